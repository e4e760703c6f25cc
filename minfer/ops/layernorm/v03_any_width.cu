// v03_any_width: v02_vectors with one barrier of the block instead of two, and as many threads as the width needs.
// Idea: each warp computes the mean of its own elements and the sum of their squared differences from it, and the block
// combines both at once (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
// 1979). Each thread of a row has three vectors (eight in the longest rows): few warps, because each takes more than ten
// shuffles. Rows bypass the L1, which keeps weight and bias. Rows that are no multiple of 16 bytes are loaded one element at a
// time.
// Expected: rmsnorm's speed at widths such as 2880, 5120 and 7168, for which triton_rows rounds up to a power of two.
// Measured (H100 80GB HBM3, bfloat16, tokens=4096, hidden=16384): 2908 GB/s cold, 2825 steady; 160.6 % and 160.4 % of torch.
#include <algorithm>

#include "cuda/row_pieces.cuh"
#include "layernorm.h"

namespace minfer {

template <typename Piece>
__device__ float sum_of(const Piece& x) {
  float values[Piece::kCount], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (float value : values) sum += value;
  return sum;
}

template <typename Piece>
__device__ float squares_from(const Piece& x, float mean) {
  float values[Piece::kCount], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (float value : values) sum += (value - mean) * (value - mean);
  return sum;
}

template <typename Piece>
__device__ Piece normalised(const Piece& x, float mean, float scale, const Piece& weight, const Piece& bias) {
  float values[Piece::kCount], weights[Piece::kCount], shifts[Piece::kCount];
  x.unpack(values), weight.unpack(weights), bias.unpack(shifts);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) values[i] = (values[i] - mean) * scale * weights[i] + shifts[i];
  return Piece(values);
}

// The sum of `value` over each group of `span` adjacent lanes, which all lanes of the group get. `span` is a power of two.
__device__ inline float sum_lanes(float value, int span) {
  for (int mask = span / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

template <typename T, typename Piece, int kPieces, bool kEarly>
__global__ void __launch_bounds__(kMostThreadsOfRow) any_width(LayerNorm<T> p, int pieces) {
  // Of each warp: the sum of its elements, the sum of their squared differences from their mean, their number, and their mean.
  __shared__ float4 of_warps[kMostThreadsOfRow / 32];
  const int row = blockIdx.x * blockDim.y + threadIdx.y, mine = row < p.tokens ? pieces : 0;
  Piece x[kPieces], weight[kPieces], bias[kPieces];
  load_pieces(x, p.x + row * p.x_stride, mine);
  if constexpr (kEarly) load_shared_pieces(weight, p.weight, pieces), load_shared_pieces(bias, p.bias, pieces);

  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int count = 0;  // of the warp's elements
#pragma unroll
  for (int i = 0; i < kPieces; ++i) count += min(max(pieces - warp * 32 - i * int(blockDim.x), 0), 32) * Piece::kCount;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) sum += sum_of(x[i]);
  sum = sum_lanes(sum, 32);
  float mean = __fdividef(sum, float(max(count, 1)));
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    x[i].stay_packed();
    //@ variance
    if (threadIdx.x + i * blockDim.x < mine) squares += squares_from(x[i], mean);  // pieces beyond the row are 0, not the mean
  }
  squares = sum_lanes(squares, 32);
  if (warps > 1) {
    float4* const row_warps = of_warps + threadIdx.y * warps;
    if (lane == 0) row_warps[warp] = float4{sum, squares, float(count), mean};
    __syncthreads();
    const int span = 1 << (32 - __clz(warps - 1));  // the least power of two that is not below `warps`
    const int from = lane & (span - 1);
    const float4 other = from < warps ? row_warps[from] : float4{};
    mean = sum_lanes(other.x, span) * p.share;
    const float apart = other.w - mean;
    squares = sum_lanes(other.y + other.z * apart * apart, span);  //@ apart
  }
  const float scale = rsqrtf(squares * p.share + p.eps);
  BitsOf<Piece>* y = reinterpret_cast<BitsOf<Piece>*>(p.y + row * p.y_stride);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i].stay_packed();
    if (at >= mine) continue;
    if constexpr (kEarly) {
      weight[i].stay_packed(), bias[i].stay_packed();
    } else {
      weight[i].bits = pieces_of<Piece>(p.weight)[at];
      bias[i].bits = pieces_of<Piece>(p.bias)[at];
    }
    y[at] = normalised(x[i], mean, scale, weight[i], bias[i]).bits;
  }
}

template <typename Piece, int kPieces, bool kEarly, typename T>
void launch_with(const LayerNorm<T>& p, int pieces) {
  const int threads = (pieces + 32 * kPieces - 1) / (32 * kPieces) * 32;  // of a row
  const int rows = std::max(1, 128 / threads);                             // of a block
  any_width<T, Piece, kPieces, kEarly>
      <<<(p.tokens + rows - 1) / rows, dim3(threads, rows), 0, p.stream>>>(p, pieces);
}

template <typename Piece, typename T>
void launch_for(const LayerNorm<T>& p) {
  const int pieces = p.hidden / Piece::kCount;
  STD_TORCH_CHECK(pieces <= kMostPieces * kMostThreadsOfRow, "layernorm: x must have at most ",
                  kMostPieces * kMostThreadsOfRow * Piece::kCount, " elements in a row, got ", p.hidden);
  if (pieces <= 3 * kMostThreadsOfRow) launch_with<Piece, 3, true>(p, pieces);
  else launch_with<Piece, kMostPieces, false>(p, pieces);  // weight and bias do not fit the registers, too
}

template <typename T>
void launch(const LayerNorm<T>& p) {
  if (p.hidden % Vector<T>::kCount == 0) require_vectors(p), launch_for<Vector<T>>(p);
  else launch_for<Element<T>>(p);
}

}  // namespace minfer

MINFER_LAYERNORM(layernorm_v03_any_width, minfer::launch)
