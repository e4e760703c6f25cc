// The add_rmsnorm_quant kernel, for rows whose pieces are 16 bytes or one element.
#pragma once

#include <algorithm>

#include "add_rmsnorm_quant.h"
#include "cuda/quantise.cuh"
#include "cuda/row_pieces.cuh"

namespace minfer {

constexpr int kKept = 4;  // pieces that a thread keeps from the sum to the bytes

template <typename Piece>
__device__ Piece added(const Piece& a, const Piece& b) {
  float one[Piece::kCount], other[Piece::kCount];
  a.unpack(one), b.unpack(other);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) one[i] += other[i];
  return Piece(one);
}

// The sum of squares, and the largest magnitude of value * weight, of the elements that a thread has seen.
struct Seen {
  float squares = 0.0f, largest = 0.0f;

  template <typename Piece>
  __device__ void add(const Piece& total, const Piece& weight) {
    float x[Piece::kCount], w[Piece::kCount];
    total.unpack(x), weight.unpack(w);
#pragma unroll
    for (int i = 0; i < Piece::kCount; ++i) squares += x[i] * x[i], largest = fmaxf(largest, fabsf(x[i] * w[i]));
  }
};

template <typename Piece, typename Y>
__device__ void store_scaled(Y* row, int at, const Piece& total, const Piece& weight, float factor) {
  float x[Piece::kCount], w[Piece::kCount];
  total.unpack(x), weight.unpack(w);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) x[i] *= w[i] * factor;
  store_bytes(row, at, x);
}

// A block has a row. Pieces that its threads do not keep are read again by the thread that stored them.
template <typename Piece, typename T, typename Y>
__global__ void __launch_bounds__(kMostThreadsOfRow) rows(AddRmsNormQuant<T, Y> p, int pieces) {
  __shared__ float of_squares[kMostThreadsOfRow / 32];
  __shared__ float of_largest[kMostThreadsOfRow / 32];
  const int64_t row = blockIdx.x;
  const T* x_row = p.x + row * p.x_stride;
  T* residual_row = p.residual ? p.residual + row * p.residual_stride : nullptr;
  BitsOf<Piece>* residual = reinterpret_cast<BitsOf<Piece>*>(residual_row);
  const BitsOf<Piece>* weights = pieces_of<Piece>(p.weight);
  Piece total[kKept], weight[kKept];
  load_pieces(total, x_row, pieces);
  if (residual) {
    Piece before[kKept];
    load_pieces(before, residual_row, pieces);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      total[i] = added(before[i], total[i]);
      if (at < pieces) residual[at] = total[i].bits;
    }
  }
  load_shared_pieces(weight, p.weight, pieces);
  Seen seen;
#pragma unroll
  for (int i = 0; i < kKept; ++i) seen.add(total[i], weight[i]);
  const int rest = threadIdx.x + kKept * blockDim.x;
  for (int at = rest; at < pieces; at += blockDim.x) {
    Piece sum, of_sum;
    sum.bits = pieces_of<Piece>(x_row)[at], of_sum.bits = weights[at];
    if (residual) {
      Piece before;
      before.bits = residual[at];
      sum = added(before, sum);
      residual[at] = sum.bits;
    }
    seen.add(sum, of_sum);  //@ rest_seen
  }
  const float scale = rsqrtf(reduce_row(seen.squares, of_squares) * p.share + p.eps);
  const float largest = reduce_row(seen.largest, of_largest, Max{});  //@ maximum
  const float factor = factor_of_row<Y>(largest);
  if (threadIdx.x == 0) p.scales[row] = largest * scale * (1.0f / kMostOfByte<Y>);
  Y* y = p.y + row * p.hidden;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < pieces) store_scaled(y, at, total[i], weight[i], factor);  //@ row_end
  }
  const BitsOf<Piece>* totals = residual ? residual : pieces_of<Piece>(x_row);
  for (int at = rest; at < pieces; at += blockDim.x) {
    Piece sum, of_sum;
    sum.bits = totals[at], of_sum.bits = weights[at];
    store_scaled(y, at, sum, of_sum, factor);
  }
}

template <typename Piece, typename T, typename Y>
void launch_rows(const AddRmsNormQuant<T, Y>& p) {
  const int pieces = p.hidden / Piece::kCount;
  // With few rows a thread has one piece. With many rows it has two, so that more rows fit an SM.
  const int each = p.tokens <= multiprocessors() ? 1 : 2;
  const int threads = std::clamp((pieces + 32 * each - 1) / (32 * each) * 32, 32, kMostThreadsOfRow);
  rows<Piece><<<p.tokens, threads, 0, p.stream>>>(p, pieces);
}

}  // namespace minfer
