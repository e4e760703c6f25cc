// blocks: a block a row, and for each of the k a pass that finds what comes next by value, and by index among equal values.
#include "ops/op.h"

using minfer::Tensor;

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) topk(T* values, int32_t* indices, const T* x, int n, int k) {
  __shared__ float best[kThreads];
  __shared__ int where[kThreads];
  x += static_cast<int64_t>(blockIdx.x) * n;
  float last = 0;
  int last_at = -1;
  for (int rank = 0; rank < k; ++rank) {
    float mine = 0;
    int at = n;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float value = float(x[i]);
      const bool left = last_at < 0 || value < last || (value == last && i > last_at);
      if (left && (at == n || value > mine)) mine = value, at = i;
    }
    best[threadIdx.x] = mine, where[threadIdx.x] = at;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) {
        const float other = best[threadIdx.x + half];
        const int there = where[threadIdx.x + half], here = where[threadIdx.x];
        if (there < n && (here == n || other > best[threadIdx.x] || (other == best[threadIdx.x] && there < here)))
          best[threadIdx.x] = other, where[threadIdx.x] = there;
      }
      __syncthreads();
    }
    last = best[0], last_at = where[0];
    if (threadIdx.x == 0) {
      values[static_cast<int64_t>(blockIdx.x) * k + rank] = x[last_at];
      indices[static_cast<int64_t>(blockIdx.x) * k + rank] = last_at;
    }
    __syncthreads();
  }
}

static void foreign_topk_blocks(Tensor values, Tensor indices, const Tensor x) {
  const int64_t rows = x.size(0), n = x.size(1), k = values.size(1);
  minfer::check_sizes(values, "topk: values", {rows, k});
  minfer::check_sizes(indices, "topk: indices", {rows, k});
  minfer::check_contiguous(values, "topk: values");
  minfer::check_contiguous(indices, "topk: indices");
  minfer::check_contiguous(x, "topk: x");
  const cudaStream_t stream = minfer::stream_of(x);
  const int blocks = minfer::to_int(rows, "topk: x"), length = minfer::to_int(n, "topk: x"), most = static_cast<int>(k);
  int32_t* at = minfer::output<int32_t>(indices, "topk: indices");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(x.scalar_type(), "topk: x", [&]<typename T>() {
    T* found = minfer::output<T>(values, "topk: values");
    topk<T><<<blocks, kThreads, 0, stream>>>(found, at, minfer::input<T>(x, "topk: x"), length, most);
  });
  minfer::check_launch();
}

MINFER_OP(foreign_topk_blocks, "(Tensor(a!) values, Tensor(b!) indices, Tensor x) -> ()")
