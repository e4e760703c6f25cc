// v04_few_rows: few tokens an expert, as in decode: weights go from memory straight to registers and are read once.
// Idea: tokens are the 8 columns of mma.sync and weights its 16 rows, so that 8 tokens fill it. Within a product, k may be in
// any order that both operands share: a lane loads 16 contiguous bytes of a weight's row, which are its fragments of two
// products, and needs no shared memory. The warps of a block divide k and add their sums at the end. A block takes the expert
// at its position in `order`, or the expert with the block's own number where there are fewer experts than slots. The second
// product starts while the first ends, and has its weights brought to the L2 meanwhile.
// Expected: memory's speed, where reading weights takes the time: (1 token, k 8, 2048 x 768) 75 MB, 18 us of an H200 at 4.2
// TB/s, and 6 us for three launches; (1, k 2, 4096 x 14336) 705 MB, 168 us.
// Measured (H200, bfloat16, uniform, tokens=16, experts=8, k=2, hidden=4096, ffn=14336): 15.69 TFLOP/s cold; 153.0 % of torch.
#include <algorithm>

#include "combine.cuh"
#include "cuda/counters.cuh"
#include "cuda/mma.cuh"

namespace minfer {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kColumns = 16, kChunk = 64;  // rows of a weight, of which a warp takes 128 bytes at a time

// One of the two products of an expert: y = x w for scattered rows of x.
template <typename T, typename Rows>
struct Product {
  const T* w;      // (columns, depth) of the expert
  int64_t second;  // elements from w to the weight beside it, where there are two
  int columns, depth;
  Rows rows;  // where row i of x begins
};

// This warp's partial sums, over its part of k: of 16 columns from `col0` on and 8 kTiles rows from `row0` on, of which `count`
// are real.
template <int kTiles, int kWeights, typename T, typename Rows>
__device__ void multiply(float (&sums)[kWeights][kTiles][4], const Product<T, Rows>& of, int row0, int count, int col0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T *x[kTiles], *w[kWeights][2];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) x[j] = of.rows(row0 + min(j * 8 + lane / 4, count - 1));
#pragma unroll
  for (int i = 0; i < 2 * kWeights; ++i)
    w[i / 2][i % 2] = of.w + i / 2 * of.second + int64_t(min(col0 + i % 2 * 8 + lane / 4, of.columns - 1)) * of.depth;

#pragma unroll 1
  for (int k0 = warp * kChunk; k0 < of.depth; k0 += kWarps * kChunk) {
    uint4 a[2][kWeights][2], b[2][kTiles];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = k0 + half * 32 + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2 * kWeights; ++i)
        a[half][i / 2][i % 2] = k < of.depth ? __ldcs(reinterpret_cast<const uint4*>(w[i / 2][i % 2] + k)) : uint4{};
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        b[half][j] = k < of.depth ? *reinterpret_cast<const uint4*>(x[j] + k) : uint4{};
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // 16 of k each: two of a lane's four words
      const auto word = [&](const uint4& piece, int i) { return (&piece.x)[step % 2 * 2 + i]; };
#pragma unroll
      for (int i = 0; i < kWeights; ++i) {
        const uint4 &low = a[step / 2][i][0], &high = a[step / 2][i][1];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          mma_m16n8k16<T>(sums[i][j], {word(low, 0), word(high, 0), word(low, 1), word(high, 1)},
                          {word(b[step / 2][j], 0), word(b[step / 2][j], 1)});
      }
    }
  }
}

// Partial sums of a block's warps for 16 rows: the four sums of a lane for one tile, lane after lane.
template <int kWeights>
constexpr int kPartial = kWarps * kWeights * 2 * 32 * 4;

// Calls store(row, col, sums of each weight) for 16 columns and `count` rows: one of each thread.
template <int kTiles, int kWeights, typename T, typename Rows, typename Store>
__device__ void strip(const Product<T, Rows>& of, int row0, int count, int col0, float* partial, Store store) {
  float sums[kWeights][kTiles][4] = {};
  multiply(sums, of, row0, count, col0);
  __syncthreads();  // all have read the previous sums  //@ sums_read
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kWeights * kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[((warp * kWeights * kTiles + i) * 32 + lane) * 4 + e] = sums[i / kTiles][i % kTiles][e];
  __syncthreads();
  const int col = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  if (row >= count || col0 + col >= of.columns) return;
  const int at = (col % 8 * 4 + row % 8 / 2) * 4 + col / 8 * 2 + row % 2;  // in a tile: the lane's, and which of four
  float whole[kWeights] = {};
#pragma unroll
  for (int from = 0; from < kWarps; ++from)
#pragma unroll
    for (int i = 0; i < kWeights; ++i)
      whole[i] += partial[((from * kWeights + i) * kTiles + row / 8) * 128 + at];
  store(row0 + row, col0 + col, whole);
}

// The rows of this block's expert, in the order of `order`; none where another block computes that expert.
template <typename T>
__device__ int3 rows_of_block(const Experts<T>& p, bool by_position) {
  const int all = min(p.offsets[p.experts - 1], p.slots);
  int expert = blockIdx.y;
  if (by_position) {
    if (int(blockIdx.y) >= all) return {0, 0, 0};
    expert = p.indices[min(unsigned(p.order[blockIdx.y]), unsigned(p.slots - 1))];
    if (unsigned(expert) >= unsigned(p.experts)) return {0, 0, 0};
  }
  const int begin = expert ? max(p.offsets[expert - 1], 0) : 0, end = min(p.offsets[expert], all);
  return {expert, begin, by_position && begin != int(blockIdx.y) ? begin : end};
}

template <typename T>
__device__ unsigned slot_at(const Experts<T>& p, int place) {
  return min(unsigned(p.order[place]), unsigned(p.slots - 1));
}

// Calls f.operator()<kTiles>(first row, rows) for 16 rows at a time, or 8 where no more are left.
template <typename F>
__device__ void for_rows(int begin, int end, F f) {
  for (int row = begin; row < end; row += 16) {
    const int count = min(16, end - row);
    if (count <= 8) f.template operator()<1>(row, count);
    else f.template operator()<2>(row, count);
  }
}

// h = silu(x Wg) * (x Wu), (slots, ffn) in the order of `order`.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gate_up(Experts<T> p, T* h, bool by_position) {
  __shared__ __align__(16) float partial[kPartial<2>];
  let_next_start();
  const int3 of = rows_of_block(p, by_position);
  if (of.y >= of.z) return;
  const int64_t weight = int64_t(p.ffn) * p.hidden;
  const auto rows = [&](int place) { return p.x + slot_at(p, place) / p.k * p.ldx; };
  const Product<T, decltype(rows)> product{p.gate_up + of.x * 2 * weight, weight, p.ffn, p.hidden, rows};
  for_rows(of.y, of.z, [&]<int kTiles>(int row, int count) {
    strip<kTiles, 2>(product, row, count, blockIdx.x * kColumns, partial, [&](int place, int col, const float (&sums)[2]) {
      h[place * int64_t(p.ffn) + col] = T(swiglu(sums[0], sums[1]));
    });
  });
}

// Each slot's part of out, (slots, hidden), by its number.
template <typename T>
__global__ void __launch_bounds__(kThreads, 3) down(Experts<T> p, const T* h, T* parts, bool by_position) {
  __shared__ __align__(16) float partial[kPartial<1>];
  let_next_start();
  const int3 of = rows_of_block(p, by_position);
  if (of.y >= of.z) return;
  const auto rows = [&](int place) { return h + place * int64_t(p.ffn); };
  const Product<T, decltype(rows)> product{p.down + of.x * int64_t(p.hidden) * p.ffn, 0, p.hidden, p.ffn, rows};
  // Weights do not depend on the launch before: 128 bytes a thread come from memory while it ends.
  const int row = blockIdx.x * kColumns + threadIdx.x % kColumns, k = threadIdx.x / kColumns * 64;
  if (row < p.hidden && k < p.ffn) prefetch_to_l2(product.w + row * int64_t(p.ffn) + k);
  wait_for_previous();
  for_rows(of.y, of.z, [&]<int kTiles>(int row, int count) {
    strip<kTiles, 1>(product, row, count, blockIdx.x * kColumns, partial, [&](int place, int col, const float (&sums)[1]) {
      parts[slot_at(p, place) * int64_t(p.hidden) + col] = T(sums[0]);
    });
  });
}

template <typename T>
void launch(const Experts<T>& p) {
  require_pieces(p);
  STD_TORCH_CHECK(p.experts <= 65535, "moe_ffn: this kernel takes at most 65535 experts, got ", p.experts);
  const auto memory = scratch_words((int64_t(p.slots) * (p.ffn + p.hidden) + 1) / 2);
  T *h = static_cast<T*>(memory.mutable_data_ptr()), *parts = h + int64_t(p.slots) * p.ffn;
  const bool by_position = p.slots <= p.experts;
  const int across = std::min(p.slots, p.experts);
  const auto blocks = [&](int columns) { return dim3((columns + kColumns - 1) / kColumns, across); };
  gate_up<<<blocks(p.ffn), kThreads, 0, p.stream>>>(p, h, by_position);
  STD_CUDA_CHECK(launch_early(down<T>, 1, blocks(p.hidden), kThreads, 0, p.stream, p, static_cast<const T*>(h), parts,
                              by_position));
  launch_combine_early(p, parts);
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_v04_few_rows, minfer::launch)
