// int4 on Hopper: how a warpgroup unpacks weights into registers as wgmma's A, and how it adds up and stores its tile of y.
//
// The operands are swapped: wgmma's 64 rows are rows of W, and its columns are rows of x, here called tokens. So the weights
// are the operand that wgmma reads from registers, and unpacked weights are never written to shared memory.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/wgmma_registers_wide.cuh"
#include "fragments.cuh"

namespace minfer {

constexpr int kRowsOfW = 128;  // of a tile of y: 64 for each of two warpgroups
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;
constexpr int kBoxTokens = 32, kBox = kBoxTokens * 64, kBoxes = 4;  // of y, which a warpgroup stores at once; elements

// The numbers that turn a group's q into weights of type T. A weight is (base + q - middle) * scale + rest, and the difference
// is exact. `middle` is base + the zero, rounded to an integer. `rest` is what the rounding leaves, times the scale.
struct GroupScale {
  uint32_t middle_scale, rest;  // `middle` and the scale; `rest` twice
};

template <typename T>
__device__ inline GroupScale group_scale(T scale, T zero) {
  constexpr float kOne = std::is_same_v<T, __half> ? 1024.0f : 128.0f;  // kBase
  const float z = float(zero), whole = fminf(fmaxf(rintf(z), -128.0f), 127.0f), left = z - whole;
  const T middle = T(kOne + whole), rest = T(left == 0.0f ? 0.0f : -left * float(scale));  // 0 if the scale is infinite, too
  const T pairs[4] = {middle, scale, rest, rest};
  GroupScale made;
  memcpy(&made, pairs, 8);
  return made;
}

// A stage in shared memory has kStepK values of k: kTokens rows of x, in boxes of 64 with the 128-byte swizzle; kRowsOfW rows
// of packed weights, with the swizzle of a row's length in bytes; and the scales of their groups.
template <int kGroup, int kTokens>
struct Int4Stage {
  static constexpr int kStepK = kTokens <= 128 ? 128 : 64;
  static constexpr int kBoxX = kTokens * 64 * 2, kX = kStepK / 64 * kBoxX, kRowW = kStepK / 2, kW = kRowsOfW * kRowW;
  static constexpr int kGroups = kStepK > kGroup ? kStepK / kGroup : 1;
  static constexpr int kScales = kGroups * kRowsOfW * sizeof(GroupScale), kBytes = kX + kW + kScales;
  static constexpr int kParts = 2, kPartK = kStepK / kParts, kProducts = kPartK / 16;
  static_assert(kX % 1024 == 0 && kBytes % 1024 == 0);
};

// A lane's packed weights of one part of a stage, from rows lane / 4 and lane / 4 + 8 of its warp's 16, and the numbers that
// unpack them. The four lanes of a row have the same words. Each takes one byte of a word: two neighbours in k.
template <typename T, typename Stage>
struct Packed {
  static constexpr int kPieces = Stage::kPartK / 32;  // of 16 bytes, 32 weights
  uint32_t words[2][kPieces * 4];
  GroupScale scales[2];

  __device__ void load(const uint8_t* stage, int part) {
    const int row = threadIdx.x / 32 % 4 * 16 + warpgroup_index() * 64 + threadIdx.x % 32 / 4;
    const GroupScale* groups = reinterpret_cast<const GroupScale*>(stage + Stage::kX + Stage::kW) +
                               (Stage::kGroups > 1 ? part * kRowsOfW : 0);  //@ group
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + half * 8, offset = at * Stage::kRowW;
      scales[half] = groups[at];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = part * kPieces + i;
        const uint4 found = *reinterpret_cast<const uint4*>(
            stage + Stage::kX + offset + (piece ^ (offset >> 7 & (Stage::kRowW / 16 - 1))) * 16);  //@ swizzle_w
        memcpy(&words[half][i * 4], &found, 16);
      }
    }
  }

  // The fragment of product `i` of the part.
  __device__ void unpack(uint32_t (&fragment)[4], int i) const {
    const uint32_t selector = threadIdx.x % 4 * 0x101u + 0x400u;  // the lane's byte of a word, then of the shifted word
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t middle = __byte_perm(scales[half].middle_scale, 0, 0x1010);
      const uint32_t scale = __byte_perm(scales[half].middle_scale, 0, 0x3232);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight)
        fragment[half + eight * 2] = weights(words[half][i * 2 + eight], selector, middle, scale, scales[half].rest);
    }
  }

  __device__ static uint32_t weights(uint32_t word, uint32_t selector, uint32_t middle, uint32_t scale, uint32_t rest) {
    using Pair = typename Vector<T>::Pair;
    const uint32_t numbers = two_above_base<T, 4>(__byte_perm(word, word >> 4, selector));
    const uint32_t exact = minus<T>(numbers, middle);
    const Pair found = __hfma2(reinterpret_cast<const Pair&>(exact), reinterpret_cast<const Pair&>(scale),
                               reinterpret_cast<const Pair&>(rest));
    return reinterpret_cast<const uint32_t&>(found);
  }
};

// The sums of one warpgroup: 64 rows of W by kTokens tokens.
template <typename T, int kTokens>
struct SwappedTile {
  static constexpr int kSums = kTokens / 2, kBoxSums = kBoxTokens / 2;
  static constexpr int kExchange = kTokens * kRowsOfW * 4;  // bytes that the sums of a block take

  float sums[1][kSums];

  // Adds up the sums of the `splits` blocks of a cluster. Block number `split` gets the sums of those boxes for which is_mine()
  // is true. Meanwhile the producers call cluster_sync(). All threads of the cluster call it once more before a block exits.
  // `exchange` is the memory of the stages.
  __device__ void add_up(uint8_t* exchange, int splits, int split) {
    float4* mine = reinterpret_cast<float4*>(exchange) + threadIdx.x;
    named_barrier_sync(3, kConsumers * 128);  // both warpgroups are done with the stages
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j)
      mine[j * kConsumers * 128] = {sums[0][4 * j], sums[0][4 * j + 1], sums[0][4 * j + 2], sums[0][4 * j + 3]};
    cluster_sync();
#pragma unroll
    for (int box = 0; box < kTokens / kBoxTokens; ++box) {
      if (!is_mine(box, splits, split)) continue;
#pragma unroll 1
      for (int block = 1; block < splits; ++block) {  // in an order that does not change from run to run
        const float4* theirs = at_block(mine, split + block & splits - 1);  //@ block
#pragma unroll
        for (int j = box * (kBoxSums / 4); j < (box + 1) * (kBoxSums / 4); ++j) {
          const float4 part = theirs[j * kConsumers * 128];
          sums[0][4 * j] += part.x, sums[0][4 * j + 1] += part.y, sums[0][4 * j + 2] += part.z, sums[0][4 * j + 3] += part.w;
        }
      }
    }
  }

  // `splits` is a power of two.
  __device__ static bool is_mine(int box, int splits, int split) { return (box & splits - 1) == split; }

  // Stores this block's boxes, from `row` of W and `token` on. When it returns, TMA may still read the last ones.
  __device__ void store(const TensorMap& map, T* boxes, int row, int token, int tokens, int splits, int split) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, mine = warpgroup_index();
    int count = 0;
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();  // for the tile before: it may have ended at any box  //@ stored
#pragma unroll
    for (int box = 0; box < kTokens / kBoxTokens; ++box) {
      if (!is_mine(box, splits, split) || token + box * kBoxTokens >= tokens) continue;
      T* to = boxes + (mine * kBoxes + count++ % kBoxes) * kBox;
      if (threadIdx.x % 128 == 0) tma_store_wait<kBoxes - 1>();
      named_barrier_sync(1 + mine, 128);
#pragma unroll
      for (int i = 0; i < kBoxTokens / 16; ++i) {
        uint32_t bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = sums[0] + box * kBoxSums + i * 8 + j * 2;
          round_to(reinterpret_cast<typename Vector<T>::Pair&>(bits[j]), pair[0], pair[1]);
        }
        // Matrix 0 is 8 rows of W by 8 tokens, 1 the next 8 rows, and 2 and 3 the next 8 tokens.
        const int piece = warp * 2 + lane / 8 % 2, at = i * 16 + lane / 16 * 8 + lane % 8;
        stmatrix_x4_transposed(to + at * 64 + (piece ^ lane % 8) * 8, bits);
      }
      fence_async();
      named_barrier_sync(1 + mine, 128);  //@ box_written
      if (threadIdx.x % 128 == 0) {
        tma_store(map, to, row + mine * 64, token + box * kBoxTokens);
        tma_store_commit();
      }
    }
  }
};

}  // namespace minfer
