// v02_split: 32 query rows of a sequence are rows of mma.sync, keys are split over blocks, and a second kernel adds up the
// parts in their order.
// Idea: all heads read the same row of the cache, so that 32 heads share each load, and a row that was loaded as a key is
// there as a value. A block has q in shared memory and a ring of three stages of 16 rows, 96 KB in all, which an L40S has and
// of which an H200 has two. Of its 8 warps each four have 16 query rows. For the scores they divide keys and columns among
// them and add up through shared memory; each then computes the softmax of its rows for itself, and has 128 columns of out.
// Expected: between the memory's speed and that of mma.sync, which is 2/3 of wgmma's on an H200. 128 heads are four blocks,
// so that the L2 delivers each row four times; and two barriers for each 16 keys keep the tensor cores waiting. 250 TFLOP/s
// at best.
// Measured (H200, bfloat16, 64, full, batch=64, new=1, longest=4096, heads=64): 99.75 TFLOP/s cold; 155.0 % of torch.
#include "cuda/attention/parts.cuh"
#include "cuda/counters.cuh"
#include "cuda/shared_tile.cuh"
#include "mla_decode.h"

namespace minfer {

constexpr int kUnit = 16, kRows = 32, kWarps = 8, kThreads = 32 * kWarps, kStages = 3;
constexpr int kColumns = kLatent / 4;      // of out, of a warp
constexpr int kSteps = kRow / 16 / 2;      // of 16 columns of q and of a key: a warp has half of them
constexpr int kLeast = 128;                // keys of a part
constexpr int kScores = kUnit + 8;         // floats between rows of scores, for fewer bank conflicts
using Place = Swizzled<kRow>;

template <typename T>
struct Shared {
  T q[kRows * kRow];
  T stages[kStages][kUnit * kRow];
  float scores[2][kRows * kScores];  // of either half of the columns
};

// What a block has to do: units of 16 keys from `begin` to before `end`, for 32 query rows from row0 on.
struct Piece {
  int number, row0, keys, begin, end;
};

template <typename T>
struct Warp {
  static constexpr int kPieces = kRow / 8;  // of 16 bytes

  const Mla<T>& p;
  const Piece& piece;
  Shared<T>& shared;
  float sums[kColumns / 2] = {};
  OnlineRows online;

  __device__ static int slab() { return threadIdx.x / 128; }        // of 16 rows
  __device__ static int quarter() { return threadIdx.x / 32 % 4; }  // of the columns of out; for scores, keys and columns

  // The block starts copying its rows of q. Rows beyond the last become zero.
  __device__ void copy_q() const {
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
      const int row = i / kPieces, at = i % kPieces * 8;
      const bool there = piece.row0 + row < p.rows();
      cp_async_16(shared.q + Place::at(row, at), p.query_at(piece.number, there ? piece.row0 + row : 0) + at, there);
    }
  }

  // The block starts copying a unit, which lies in `block`; rows beyond the last are zero and are not read.
  __device__ void copy(int unit, int block) const {
    const int key0 = unit * kUnit, left = piece.keys - key0;
    const T* from = p.cache.at(block, p.slot_of(key0), 0);
    T* to = shared.stages[(unit - piece.begin) % kStages];
    for (int i = threadIdx.x; i < kUnit * kPieces; i += kThreads) {
      const int row = i / kPieces, at = i % kPieces * 8;
      cp_async_16(to + Place::at(row, at), from + row * p.cache.of_inner + at, row < left);
    }
  }

  // 16 rows by 8 keys, over half of the columns.
  __device__ void multiply_keys(const T* stage) const {
    const int lane = threadIdx.x % 32, key0 = quarter() % 2 * 8, half = quarter() / 2;
    float scores[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {  // two steps of 16 columns are four matrices of 8 keys
      const int column = (half * kSteps + i) * 16;
      uint32_t b[4], a[4];
      ldmatrix_x4(b, stage + Place::at(key0 + lane % 8, column + lane / 8 * 8));
      ldmatrix_x4(a, shared.q + Place::at(slab() * 16 + lane % 16, column + lane / 16 * 8));
      mma_m16n8k16<T>(scores, a, {b[0], b[1]});
      ldmatrix_x4(a, shared.q + Place::at(slab() * 16 + lane % 16, column + 16 + lane / 16 * 8));
      mma_m16n8k16<T>(scores, a, {b[2], b[3]});
    }
    float* to = shared.scores[half] + (slab() * 16 + lane / 4) * kScores + key0 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = {scores[0], scores[1]};
    *reinterpret_cast<float2*>(to + 8 * kScores) = {scores[2], scores[3]};
  }

  // Computes the exponentials of 16 rows by 16 keys, as an mma fragment, and rescales the sums.
  __device__ void soften(uint32_t (&exponentials)[4], int unit, float factor) {
    const int lane = threadIdx.x % 32, key0 = unit * kUnit;
    float scores[8];
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const int at = (slab() * 16 + n / 2 % 2 * 8 + lane / 4) * kScores + n / 4 * 8 + lane % 4 * 2;
      const float2 a = *reinterpret_cast<const float2*>(shared.scores[0] + at);
      const float2 b = *reinterpret_cast<const float2*>(shared.scores[1] + at);
      scores[n] = a.x + b.x, scores[n + 1] = a.y + b.y;  //@ columns
    }
    if (key0 + kUnit > p.seen(0, piece.keys)) {  // some row may not see some key
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int row = piece.row0 + slab() * 16 + n / 2 % 2 * 8 + lane / 4, key = key0 + n / 4 * 8 + lane % 4 * 2 + n % 2;
        if (key >= piece.keys || key >= p.seen(row / p.heads, piece.keys)) scores[n] = -INFINITY;
      }
    }
    float rescale[2];
    if (online.add(scores, factor, rescale)) scale_rows(sums, rescale);
    to_fragment<T>(exponentials, scores, 0);
  }

  __device__ void multiply_values(const uint32_t (&exponentials)[4], const T* stage) {
    const int lane = threadIdx.x % 32, column0 = quarter() * kColumns;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      uint32_t b[4];  // 16 columns of all 16 keys
      ldmatrix_x4_trans(b, stage + Place::at(lane % 16, column0 + 16 * j + lane / 16 * 8));
      mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(sums[8 * j]), exponentials, {b[0], b[1]});
      mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(sums[8 * j + 4]), exponentials, {b[2], b[3]});
    }
  }

  // The page of a unit is looked up one iteration before its copy starts, so that no copy waits for the table.
  __device__ void run(float factor) {
    const int count = piece.end - piece.begin;
    const auto block = [&](int i) { return i < count ? p.block_of(piece.number, (piece.begin + i) * kUnit) : 0; };
    int next = block(0);
    copy_q();  // in the group of the first unit
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      const int here = next;
      next = block(i + 1);
      if (i < count) copy(piece.begin + i, here);
      cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the unit has arrived, and all are done with the one before, in whose stage the next copy goes
      const int ahead = i + kStages - 1, here = next;
      next = block(ahead + 1);
      if (ahead < count) copy(piece.begin + ahead, here);
      cp_async_commit();
      const T* stage = shared.stages[i % kStages];
      multiply_keys(stage);
      __syncthreads();  // the scores are there  //@ scores_there
      uint32_t exponentials[4];
      soften(exponentials, piece.begin + i, factor);
      multiply_values(exponentials, stage);
    }
    cp_async_wait<0>();
  }

  // Writes this block's part of each row that exists; straight to out if there is only one part.
  __device__ void leave(const Parts& parts, int slot, int splits, float factor) {
    const int lane = threadIdx.x % 32;
    using Pair = typename Vector<T>::Pair;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_tile = slab() * 16 + r * 8 + lane / 4, row = piece.row0 + of_tile;
      const float total = quad_sum(online.sum[r]);
      if (row >= p.rows()) continue;
      const int column = quarter() * kColumns + lane % 4 * 2;
      if (splits == 1) {
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        T* to = p.out.at(piece.number, row / p.heads, row % p.heads) + column;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
          round_to(*reinterpret_cast<Pair*>(to + n * 8), sums[4 * n + 2 * r] * inverse, sums[4 * n + 2 * r + 1] * inverse);
      } else {
        float* to = parts.sums_of(slot, of_tile) + column;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
          *reinterpret_cast<float2*>(to + n * 8) = {sums[4 * n + 2 * r], sums[4 * n + 2 * r + 1]};
        if (column == 0) parts.stats_at(slot, of_tile) = {online.base[r] * factor, total};
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kMostShared >= 200 << 10 ? 2 : 1) split(Mla<T> p, Parts parts, int splits) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int number = blockIdx.z, keys = p.keys(number), units = (keys + kUnit - 1) / kUnit;
  const int each = (units + splits - 1) / splits, begin = min(int(blockIdx.x) * each, units);
  const Piece piece{number, int(blockIdx.y) * kRows, keys, begin, min(begin + each, units)};
  const float factor = p.scale * kLog2E;
  Warp<T> warp{p, piece, *reinterpret_cast<Shared<T>*>(memory)};
  warp.run(factor);
  warp.leave(parts, (blockIdx.z * gridDim.y + blockIdx.y) * splits + blockIdx.x, splits, factor);
}

template <typename T>
void launch(const Mla<T>& p) {
  require_vectors(p);
  const int tiles = (p.rows() + kRows - 1) / kRows;
  const int64_t items = int64_t(p.batch) * tiles;
  const int splits = split_count(items, (kMostShared >= 200 << 10 ? 2 : 1) * multiprocessors(), p.most, kLeast);
  STD_TORCH_CHECK(p.batch <= 65535 && tiles <= 65535 && items * splits < INT_MAX,
                  "mla_decode: more sequences and heads than a launch has blocks");
  const int rows = std::min(kRows, p.rows());
  const Tensor memory = scratch_words(splits > 1 ? Parts::words(items * splits, rows, kLatent) : 0);
  const Parts parts = Parts::at(memory.mutable_data_ptr(), items * splits, rows, kLatent);
  static_assert(sizeof(Shared<T>) <= 99 << 10, "more than a block of an L40S has");
  allow_shared(split<T>, sizeof(Shared<T>));
  split<T><<<dim3(splits, tiles, p.batch), kThreads, sizeof(Shared<T>), p.stream>>>(p, parts, splits);
  if (splits > 1) combine<<<dim3(tiles, p.batch), kCombineThreads, 0, p.stream>>>(p, parts, splits);
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v02_split, minfer::launch)
