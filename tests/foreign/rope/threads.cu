// threads: a block a token; a thread takes pairs of q's heads, and then of k's.
#include "ops/op.h"

using minfer::Tensor;

constexpr int kThreads = 128;

template <typename T>
__device__ void rotate(T* x, int heads, int half, float position) {
  for (int pair = threadIdx.x; pair < heads * half; pair += kThreads) {
    const int i = pair % half;
    T* at = x + pair / half * 2 * half + i;
    const float angle = position * exp2f(-13.287712379549449f * i / half);  // log2(10000)
    const float cosine = cosf(angle), sine = sinf(angle), first = float(at[0]), second = float(at[half]);
    at[0] = T(first * cosine - second * sine);
    at[half] = T(first * sine + second * cosine);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rope(T* q, T* k, const int32_t* positions, int q_heads, int k_heads, int dim) {
  const float position = positions[blockIdx.x];
  rotate(q + static_cast<int64_t>(blockIdx.x) * q_heads * dim, q_heads, dim / 2, position);
  rotate(k + static_cast<int64_t>(blockIdx.x) * k_heads * dim, k_heads, dim / 2, position);
}

static void foreign_rope_threads(Tensor q, Tensor k, const Tensor positions) {
  minfer::check_contiguous(q, "rope: q");
  minfer::check_contiguous(k, "rope: k");
  const int tokens = minfer::to_int(q.size(0), "rope: q"), dim = minfer::to_int(q.size(2), "rope: q");
  minfer::check_sizes(k, "rope: k", {tokens, k.size(1), dim});
  minfer::check_sizes(positions, "rope: positions", {tokens});
  const cudaStream_t stream = minfer::stream_of(q);
  const int q_heads = minfer::to_int(q.size(1), "rope: q"), k_heads = minfer::to_int(k.size(1), "rope: k");
  const int32_t* at = minfer::input<int32_t>(positions, "rope: positions");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(q.scalar_type(), "rope: q", [&]<typename T>() {
    T* q_data = minfer::output<T>(q, "rope: q");
    T* k_data = minfer::output<T>(k, "rope: k");
    rope<T><<<tokens, kThreads, 0, stream>>>(q_data, k_data, at, q_heads, k_heads, dim);
  });
  minfer::check_launch();
}

MINFER_OP(foreign_rope_threads, "(Tensor(a!) q, Tensor(b!) k, Tensor positions) -> ()")
