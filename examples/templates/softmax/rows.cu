// rows: one block for each row. It reads the row twice: for the maximum and the sum at once, and for the quotients.
// Idea: examples/generate_kernels.py changes the constants. More threads have more loads in flight, but wait longer for
// each other. Wider loads are fewer; a row that they do not divide is read element by element.
#include "online.cuh"

namespace minfer {

constexpr int kThreads = 256;  // of a block
constexpr int kGroup = 4;      // loads that a thread issues before it uses the first
constexpr int kWidth = 2;      // elements of a load

template <typename T, int kElements>
struct alignas(kElements * sizeof(T)) Piece {
  T elements[kElements];
};

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads) rows(Softmax<T> p) {
  __shared__ float2 partial[kThreads / 32];
  using P = Piece<T, kElements>;
  const T* x = p.x + blockIdx.x * p.x_stride;
  T* y = p.y + blockIdx.x * p.y_stride;
  const int valid = p.valid(blockIdx.x), pieces = p.n / kElements;
  const auto load = [&](float(&logits)[kGroup][kElements], int first) {
    P found[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (const int at = first + i * kThreads; at < pieces) found[i] = reinterpret_cast<const P*>(x)[at];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const int at = (first + i * kThreads) * kElements + j;
        logits[i][j] = at < valid ? float(found[i].elements[j]) : -INFINITY;
        if (p.bias && at < valid) logits[i][j] += float(p.bias[at]);
      }
    }
  };

  Online mine;
  float logits[kGroup][kElements];
  for (int first = threadIdx.x; first < pieces; first += kGroup * kThreads) {
    load(logits, first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) mine.add(logits[i]);
  }
  const Online row = reduce_row(mine, partial);
  const float base = base_of(row.max), scale = 1.0f / row.sum;
  for (int first = threadIdx.x; first < pieces; first += kGroup * kThreads) {
    load(logits, first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      P result;
#pragma unroll
      for (int j = 0; j < kElements; ++j) result.elements[j] = T(power(logits[i][j], base) * scale);
      if (const int at = first + i * kThreads; at < pieces) reinterpret_cast<P*>(y)[at] = result;
    }
  }
}

template <typename T>
void launch(const Softmax<T>& p) {
  const auto divides = [](const T* row, int64_t stride) {
    return reinterpret_cast<uintptr_t>(row) % sizeof(Piece<T, kWidth>) == 0 && stride % kWidth == 0;
  };
  if (p.n % kWidth == 0 && divides(p.x, p.x_stride) && divides(p.y, p.y_stride))
    rows<T, kWidth><<<p.rows, kThreads, 0, p.stream>>>(p);
  else
    rows<T, 1><<<p.rows, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_rows, minfer::launch)
