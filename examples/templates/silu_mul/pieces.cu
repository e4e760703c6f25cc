// pieces: a thread takes several pieces of a row, and loads all of them before it uses the first.
// Idea: examples/generate_kernels.py changes the constants. More bytes in flight use more of the memory's bandwidth, and more
// registers. Wider pieces need fewer loads; a row that they do not divide is read element by element.
#include <algorithm>

#include "silu_mul.h"

namespace minfer {

constexpr int kThreads = 256;  // of a block
constexpr int kMany = 2;       // pieces of a thread
constexpr int kWidth = 2;      // elements of a piece

template <typename T, int kElements>
struct alignas(kElements * sizeof(T)) Piece {
  T elements[kElements];
};

template <int kElements, typename T, typename Function>
__global__ void __launch_bounds__(kThreads) pieces(Rows<T, Function> p) {
  using P = Piece<T, kElements>;
  const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (row >= p.tokens) return;
  const int first = blockIdx.x * (kThreads * kMany) + threadIdx.x, count = p.hidden / kElements;
  P in[kMany][p.kInputs];
#pragma unroll
  for (int m = 0; m < kMany; ++m) {
    const int at = first + m * kThreads;
#pragma unroll
    for (int i = 0; i < p.kInputs; ++i)
      if (at < count) in[m][i] = reinterpret_cast<const P*>(p.input[i] + row * p.input_stride[i])[at];
  }
#pragma unroll
  for (int m = 0; m < kMany; ++m) {
    const int at = first + m * kThreads;
    if (at >= count) break;
    P out[p.kOutputs];
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      float inputs[p.kInputs], outputs[p.kOutputs];
#pragma unroll
      for (int i = 0; i < p.kInputs; ++i) inputs[i] = float(in[m][i].elements[j]);
      Function()(inputs, outputs);
#pragma unroll
      for (int i = 0; i < p.kOutputs; ++i) out[i].elements[j] = T(outputs[i]);
    }
#pragma unroll
    for (int i = 0; i < p.kOutputs; ++i) reinterpret_cast<P*>(p.output[i] + row * p.output_stride[i])[at] = out[i];
  }
}

template <int kElements, typename T, typename Function>
void launch_with(const Rows<T, Function>& p) {
  const int count = p.hidden / kElements, chunk = kThreads * kMany;
  const unsigned rows = std::min(p.tokens, 32768);  // of the grid's y, which has at most 65535
  const dim3 grid((count + chunk - 1) / chunk, rows, (p.tokens + rows - 1) / rows);
  pieces<kElements><<<grid, kThreads, 0, p.stream>>>(p);
}

template <typename T, typename Function>
void launch(const Rows<T, Function>& given) {
  const Rows<T, Function> p = joined(given);
  bool divides = p.hidden % kWidth == 0;
  const auto look = [&](const T* row, int64_t stride) {
    divides &= reinterpret_cast<uintptr_t>(row) % sizeof(Piece<T, kWidth>) == 0 && stride % kWidth == 0;
  };
  for (int i = 0; i < p.kInputs; ++i) look(p.input[i], p.input_stride[i]);
  for (int i = 0; i < p.kOutputs; ++i) look(p.output[i], p.output_stride[i]);
  divides ? launch_with<kWidth>(p) : launch_with<1>(p);
}

}  // namespace minfer

MINFER_SILU_MUL(silu_mul_pieces, minfer::launch)
