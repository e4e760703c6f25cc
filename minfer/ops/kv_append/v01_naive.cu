// v01_naive: a block for a token, one element of k and of v a load.
// Idea: the definition, nothing else; neighbouring threads take neighbouring elements.
// Expected: bound by latency: the place is waited for before the first element is asked for, and a warp then has 128 bytes of
// a half type under way.
// Measured (H200, bfloat16, paged, none, none, batch=8, longest=2048, new=2048, kv_heads=8, head_dim=128): 1937 GB/s cold;
//   228.2 % of torch.
#include "fp8.cuh"

namespace minfer {

constexpr int kThreads = 128;

template <typename T, typename Cache>
__global__ void __launch_bounds__(kThreads) naive(Append<T, Cache> p) {
  const int64_t place = p.place(blockIdx.x);
  if (place < 0) return;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const T* from = p.rows[which] + blockIdx.x * p.stride[which];
    Cache* to = p.cache[which] + place * p.width;
    if constexpr (std::is_same_v<Cache, T>) {
      for (int i = threadIdx.x; i < p.width; i += kThreads) to[i] = from[i];
    } else {
      const float factor = 1.0f / p.scales[which];
      for (int i = threadIdx.x; i < p.width; i += kThreads)
        to[i] = static_cast<Cache>(to_fp8(float(from[i]) * factor, 0.0f) & 0xff);
    }
  }
}

template <typename T, typename Cache>
void launch(const Append<T, Cache>& p) {
  naive<<<p.tokens, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_KV_APPEND(kv_append_v01_naive, minfer::launch)
