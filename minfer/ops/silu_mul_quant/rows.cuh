// The silu_mul_quant kernel, for rows whose pieces are 16 bytes or one element.
#pragma once

#include <algorithm>

#include "cuda/quantise.cuh"
#include "cuda/row_pieces.cuh"
#include "silu_mul_quant.h"

namespace minfer {

constexpr int kKept = 4;  // pieces that a thread keeps as fp32 from the maximum to the bytes

template <typename Piece>
__device__ void values_of(float (&values)[Piece::kCount], const Piece& gate, const Piece& up) {
  float factors[Piece::kCount];
  gate.unpack(values), up.unpack(factors);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) values[i] = silu_times(values[i], factors[i]);
}

template <int kCount>
__device__ float largest_of(const float (&values)[kCount]) {
  float largest = 0.0f;
#pragma unroll
  for (float value : values) largest = fmaxf(largest, fabsf(value));
  return largest;
}

template <typename Y, int kCount>
__device__ void store_scaled(Y* row, int at, float (&values)[kCount], float factor) {
#pragma unroll
  for (float& value : values) value *= factor;
  store_bytes(row, at, values);
}

// A block has a row. Pieces that its threads do not keep are read and computed again.
template <typename Piece, typename T, typename Y>
__global__ void __launch_bounds__(kMostThreadsOfRow) rows(SiluMulQuant<T, Y> p, int pieces) {
  __shared__ float partial[kMostThreadsOfRow / 32];
  const int64_t row = blockIdx.x;
  const T *gate_row = p.gate + row * p.gate_stride, *up_row = p.up + row * p.up_stride;
  const auto load = [&](int at, float (&values)[Piece::kCount]) {
    Piece gate, up;
    gate.bits = pieces_of<Piece>(gate_row)[at], up.bits = pieces_of<Piece>(up_row)[at];
    values_of(values, gate, up);
  };
  Piece gate[kKept], up[kKept];
  load_pieces(gate, gate_row, pieces), load_pieces(up, up_row, pieces);
  float values[kKept][Piece::kCount], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) values_of(values[i], gate[i], up[i]), largest = fmaxf(largest, largest_of(values[i]));
  const int rest = threadIdx.x + kKept * blockDim.x;
  for (int at = rest; at < pieces; at += blockDim.x) {
    float more[Piece::kCount];
    load(at, more);
    largest = fmaxf(largest, largest_of(more));  //@ rest_maximum
  }
  largest = reduce_row(largest, partial, Max{});  //@ maximum
  const float factor = factor_of_row<Y>(largest);
  if (threadIdx.x == 0) p.scales[row] = largest * (1.0f / kMostOfByte<Y>);
  Y* y = p.y + row * p.hidden;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < pieces) store_scaled(y, at, values[i], factor);  //@ row_end
  }
  for (int at = rest; at < pieces; at += blockDim.x) {
    float more[Piece::kCount];
    load(at, more);
    store_scaled(y, at, more, factor);
  }
}

template <typename Piece, typename T, typename Y>
void launch_rows(const SiluMulQuant<T, Y>& p) {
  const int pieces = p.hidden / Piece::kCount;
  // With few rows a thread has one piece of each input. With many rows it has two, so that more rows fit an SM.
  const int each = p.tokens <= multiprocessors() ? 1 : 2;
  const int threads = std::clamp((pieces + 32 * each - 1) / (32 * each) * 32, 32, kMostThreadsOfRow);
  rows<Piece><<<p.tokens, threads, 0, p.stream>>>(p, pieces);
}

}  // namespace minfer
