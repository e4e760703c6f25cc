// The mainloop of the packed kernels: query rows that share a key-value head are the rows of tensor-core products.
//
// A warp takes a unit of 16 keys at a time, which lie in one page. Each warp has its own ring of stages in shared memory, and a
// stage is the keys and values of one unit, so that warps synchronise only at the end of a piece of work. Scores never leave
// registers.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/shared_tile.cuh"
#include "cuda/softmax.cuh"
#include "decode_attention.h"
#include "parts.cuh"

namespace minfer {

constexpr int kUnit = 16;            // keys
constexpr int kRingBytes = 96 << 10;  // of all warps of a block: an L40S's SM holds one block, an H200's two

template <typename T_, typename KV_, int kDim_, int kSlabs_>
struct PackedShape {
  using T = T_;
  using KV = KV_;
  static constexpr bool kFp8 = !std::is_same_v<KV, T>;
  using Operand = std::conditional_t<kFp8, Half, T>;  // of the products: fp16 holds every e4m3 value, one instruction converts
  static constexpr int kDim = kDim_, kSlabs = kSlabs_, kRows = 16 * kSlabs;
  static constexpr int kRowBytes = kDim * sizeof(KV), kPieces = kRowBytes / 16, kHalf = kUnit * kRowBytes;
  using Place = Swizzled<kRowBytes / 2>;  // of 16-bit words: two elements of fp8
  static constexpr int kWarps = kRowBytes > 256 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kStages = kRingBytes / (kWarps * 2 * kHalf) < 8 ? kRingBytes / (kWarps * 2 * kHalf) : 8;
  static constexpr int kWarpBytes = kStages * 2 * kHalf, kBytes = kWarps * kWarpBytes;
  static constexpr int kResident = kMostShared >= 2 * (kRingBytes + (4 << 10)) ? 2 : 1;
  static_assert(kStages >= 2 && kWarpBytes >= kRows * kDim * int(sizeof(float)), "the ring takes the sums in the end");
};

// Units [begin, end) of a sequence's keys, for the rows from row0 on that share a key-value head.
struct Piece {
  int number, kv_head, row0, keys, begin, end;
};

// 16 x 8 of a product, of the accumulators of 16 rows.
template <int kCount>
__device__ inline float (&quad(float (&sums)[kCount], int column8))[4] {
  return reinterpret_cast<float(&)[4]>(sums[4 * column8]);
}

template <typename Shape>
struct PackedWarp {
  using T = typename Shape::T;
  using KV = typename Shape::KV;
  using Operand = typename Shape::Operand;
  using Place = typename Shape::Place;
  static constexpr int kSlabs = Shape::kSlabs, kDim = Shape::kDim;

  const Decode<T, KV>& p;
  const Piece& piece;
  uint32_t q[kDim / 16][kSlabs][4];
  float unscale[kSlabs][2];  // what a row's q was divided by
  float sums[kSlabs][kDim / 2] = {};
  OnlineRows online[kSlabs];

  // The column of q for element e of a lane's pair in register `pair` of an A fragment of 16 columns. With an fp8 cache the
  // columns have the order in which bytes of keys become fragments: a lane's four bytes are its two pairs.
  __device__ static int column_of_q(int pair, int e) {
    const int t = threadIdx.x % 4;
    return Shape::kFp8 ? 4 * t + 2 * pair + e : 2 * t + 8 * pair + e;
  }

  // The column of out for element e of a row's pair in accumulator `column8`.
  __device__ static int column_of_out(int column8, int e) {
    const int t = threadIdx.x % 4;
    return Shape::kFp8 ? column8 / 2 * 16 + 4 * t + 2 * e + column8 % 2 : 8 * column8 + 2 * t + e;
  }

  // Loads the rows of q; rows beyond the last are zero. A row of bfloat16 that becomes float16 is divided by a power of 2, so
  // that its largest element is between 1 and 2.
  __device__ void load_q() {
    using Pair = typename Vector<Operand>::Pair;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = piece.row0 + 16 * i + 8 * r + lane / 4;
        const bool there = row < p.rows();
        const int query = there ? row / p.group() : 0;
        const T* from = p.q.at(piece.number, query, piece.kv_head * p.group() + (there ? row % p.group() : 0));
        unscale[i][r] = 1.0f;
        float scale = 1.0f;
        if constexpr (!std::is_same_v<Operand, T>) {
          float largest = 0.0f;
          for (int column = lane % 4; column < kDim; column += 4) largest = fmaxf(largest, fabsf(float(from[column])));
          const int exponent = int(__float_as_uint(quad_max(largest)) >> 23);
          const int kept = min(max(exponent, 1), 253);
          scale = __uint_as_float(unsigned(254 - kept) << 23), unscale[i][r] = __uint_as_float(unsigned(kept) << 23);
        }
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            uint32_t& bits = q[step][i][2 * pair + r];
            const uint32_t word = *reinterpret_cast<const uint32_t*>(from + 16 * step + column_of_q(pair, 0));
            if constexpr (std::is_same_v<Operand, T>) {
              bits = there ? word : 0;
            } else {
              const float2 two = to_floats(reinterpret_cast<const typename Vector<T>::Pair&>(word));
              round_to(reinterpret_cast<Pair&>(bits), there ? two.x * scale : 0.0f, there ? two.y * scale : 0.0f);
            }
          }
      }
  }

  // Starts copying a unit, which lies in `block`; keys beyond the last are zero and are not read.
  __device__ void copy(unsigned char* stage, int unit, int block) const {
    const int lane = threadIdx.x % 32, key0 = unit * kUnit, slot = p.slot_of(key0), left = piece.keys - key0;
    const KV *k = p.k.at(block, slot, piece.kv_head), *v = p.v.at(block, slot, piece.kv_head);
    uint16_t *k_tile = reinterpret_cast<uint16_t*>(stage), *v_tile = k_tile + Shape::kHalf / 2;
#pragma unroll
    for (int i = 0; i < kUnit * Shape::kPieces / 32; ++i) {
      const int row = (32 * i + lane) / Shape::kPieces, at = (32 * i + lane) % Shape::kPieces;
      cp_async_16(k_tile + Place::at(row, at * 8), k + row * p.k.of_inner + at * (16 / sizeof(KV)), row < left);
    }
#pragma unroll
    for (int i = 0; i < kUnit * Shape::kPieces / 32; ++i) {
      const int row = (32 * i + lane) / Shape::kPieces, at = (32 * i + lane) % Shape::kPieces;
      cp_async_16(v_tile + Place::at(row, at * 8), v + row * p.v.of_inner + at * (16 / sizeof(KV)), row < left);
    }
  }

  __device__ void multiply(const unsigned char* stage, int unit, float factor) {
    const int lane = threadIdx.x % 32, key0 = unit * kUnit;
    const uint16_t *k = reinterpret_cast<const uint16_t*>(stage), *v = k + Shape::kHalf / 2;
    float scores[kSlabs][8] = {};
#pragma unroll
    for (int step = 0; step < Shape::kRowBytes / 32; ++step) {
      uint32_t b[4];  // keys 0 to 7 and 8 to 15, 16 words of each
      ldmatrix_x4(b, k + Place::at(lane / 16 * 8 + lane % 8, 16 * step + lane / 8 % 2 * 8));
      if constexpr (Shape::kFp8) {  // 32 columns
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t word = b[2 * j + half], two[2] = {e4m3_to_halves(word), e4m3_to_halves(word >> 16)};
#pragma unroll
            for (int i = 0; i < kSlabs; ++i) mma_m16n8k16<Operand>(quad(scores[i], j), q[2 * step + half][i], two);
          }
      } else {
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          mma_m16n8k16<Operand>(quad(scores[i], 0), q[step][i], first);
          mma_m16n8k16<Operand>(quad(scores[i], 1), q[step][i], second);
        }
      }
    }

    const bool edge = key0 + kUnit > p.seen(0, piece.keys);  // some row may not see some key
    uint32_t powers[kSlabs][4];
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if constexpr (!std::is_same_v<Operand, T>) scale_rows(scores[i], unscale[i]);
      if (edge) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int row = piece.row0 + 16 * i + n / 2 % 2 * 8 + lane / 4, key = key0 + n / 4 * 8 + lane % 4 * 2 + n % 2;
          if (key >= piece.keys || key >= p.seen(row / p.group(), piece.keys)) scores[i][n] = -INFINITY;
        }
      }
      float rescale[2];
      if (online[i].add(scores[i], factor, rescale)) scale_rows(sums[i], rescale);
      to_fragment<Operand>(powers[i], scores[i], 0);
    }

#pragma unroll
    for (int j = 0; j < Shape::kRowBytes / 32; ++j) {
      uint32_t b[4];  // 16 words of all 16 keys
      ldmatrix_x4_trans(b, v + Place::at(lane % 16, 16 * j + lane / 16 * 8));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Shape::kFp8) {  // a word has two columns of a key: those of two keys become a pair of each column
          const uint32_t even[2] = {e4m3_to_halves(__byte_perm(b[2 * half], 0, 0x4420)),
                                    e4m3_to_halves(__byte_perm(b[2 * half + 1], 0, 0x4420))};
          const uint32_t odd[2] = {e4m3_to_halves(__byte_perm(b[2 * half], 0, 0x4431)),
                                   e4m3_to_halves(__byte_perm(b[2 * half + 1], 0, 0x4431))};
#pragma unroll
          for (int i = 0; i < kSlabs; ++i) {
            mma_m16n8k16<Operand>(quad(sums[i], 4 * j + 2 * half), powers[i], even);
            mma_m16n8k16<Operand>(quad(sums[i], 4 * j + 2 * half + 1), powers[i], odd);
          }
        } else {
          const uint32_t two[2] = {b[2 * half], b[2 * half + 1]};
#pragma unroll
          for (int i = 0; i < kSlabs; ++i) mma_m16n8k16<Operand>(quad(sums[i], 2 * j + half), powers[i], two);
        }
      }
    }
  }

  // Attends to every kWarps-th unit of the piece, those of this warp. It looks up the page of a unit one iteration before the
  // copy of that unit starts, so that no copy waits for the table.
  __device__ void run(unsigned char* ring, float factor) {
    const int warp = threadIdx.x / 32, first = piece.begin + warp;
    const int count = max(0, (piece.end - first + Shape::kWarps - 1) / Shape::kWarps);
    const auto unit = [&](int i) { return first + i * Shape::kWarps; };
    const auto block = [&](int i) { return i < count ? p.block_of(piece.number, unit(i) * kUnit) : 0; };
    const auto stage = [&](int i) { return ring + i % Shape::kStages * 2 * Shape::kHalf; };
    int next = block(0);
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i) {
      const int here = next;
      next = block(i + 1);
      if (i < count) copy(stage(i), unit(i), here);
      cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
    }
    load_q();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<Shape::kStages - 2>();
      __syncwarp();  // the stage has arrived for all lanes, and all have multiplied the previous one
      const int ahead = i + Shape::kStages - 1, here = next;
      next = block(ahead + 1);
      if (ahead < count) copy(stage(ahead), unit(ahead), here);
      cp_async_commit();
      multiply(stage(i), unit(i), factor);
    }
    cp_async_wait<0>();
  }

  // Writes the sums and their stats over the ring, for `merge` to read.
  __device__ void leave(float* to, float2* stats, float factor) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // all lanes have multiplied the last unit
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 16 * i + 8 * r + lane / 4;
        const float total = quad_sum(online[i].sum[r]);
        if (piece.row0 + row >= p.rows()) continue;
        if (lane % 4 == 0) stats[row] = {online[i].base[r] * factor, total};
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) to[row * kDim + column_of_out(n, e)] = sums[i][4 * n + 2 * r + e];
      }
  }
};

// Attends to a piece; a whole block calls it. Calls write(row, column, Merged) for four columns of each row at a time.
template <typename Shape, typename Write>
__device__ void attend(const Decode<typename Shape::T, typename Shape::KV>& p, const Piece& piece, unsigned char* shared,
                       Write write) {
  constexpr int kDim = Shape::kDim, kPieces = kDim / 4;
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  const int warp = threadIdx.x / 32;
  unsigned char* ring = shared + warp * Shape::kWarpBytes;
  const float factor = p.scale * p.scale_of_k() * kLog2E;
  {
    PackedWarp<Shape> rows{p, piece};
    rows.run(ring, factor);
    rows.leave(reinterpret_cast<float*>(ring), stats[warp], factor);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < min(Shape::kRows, p.rows() - piece.row0) * kPieces; i += Shape::kThreads) {
    const int row = i / kPieces, column = i % kPieces * 4;
    const auto sums_of = [&](int from) {
      return *reinterpret_cast<const float4*>(shared + from * Shape::kWarpBytes + (row * kDim + column) * sizeof(float));
    };
    write(row, column, merge(Shape::kWarps, [&](int from) { return stats[from][row]; }, sums_of));
  }
  __syncthreads();  // all have read the ring
}

// Calls launch.operator()<PackedShape>() for the problem: 32 rows where there are more than 16 and registers for them.
template <typename T, typename KV, typename Launch>
void for_shape(const Decode<T, KV>& p, Launch launch) {
  require_vectors(p);
  for_dim(p.dim, [&]<int kDim>() {
    if constexpr (kDim <= 128) {
      if (p.rows() > 16) return launch.template operator()<PackedShape<T, KV, kDim, 2>>();
    }
    launch.template operator()<PackedShape<T, KV, kDim, 1>>();
  });
}

}  // namespace minfer
