// v02_vectors: 16-byte loads of k and of v, issued before the place is known.
// Idea: rows do not depend on the place, so that place, k and v are one latency and not two; only padding has been read in
// vain, and it is memory of the same tensors. A block of few threads has a token, a thread one vector of k and one of v at
// once, so that 2048 threads of an SM have 64 KB under way. An fp8 cache is written 8 bytes a thread: still whole sectors of
// 32 bytes a quarter of a warp.
// Expected: near the copy's speed for many tokens: 16384 of 8 x 128 half elements are 134 MB, 31 us at 4.28 TB/s, and 101 MB
// with fp8. For few: one latency, and a launch.
// Measured (H200, bfloat16, paged, none, none, batch=8, longest=2048, new=2048, kv_heads=8, head_dim=128): 3890 GB/s cold, 3823
//   steady; 458.1 % and 440.9 % of torch.
#include <algorithm>

#include "fp8.cuh"

namespace minfer {

constexpr int kMostThreads = 256;

template <typename T, typename Cache>
__global__ void __launch_bounds__(kMostThreads) vectors(Append<T, Cache> p, int count) {
  const int64_t token = blockIdx.x;
  const uint4* k = reinterpret_cast<const uint4*>(p.rows[0] + token * p.stride[0]);
  const uint4* v = reinterpret_cast<const uint4*>(p.rows[1] + token * p.stride[1]);
  float factors[2] = {1.0f, 1.0f};
  if constexpr (!std::is_same_v<Cache, T>) factors[0] = 1.0f / p.scales[0], factors[1] = 1.0f / p.scales[1];
  int at = threadIdx.x;
  Vector<T> of_k, of_v;
  if (at < count) of_k.bits = k[at], of_v.bits = v[at];
  const int64_t place = p.place(token);
  if (place < 0) return;  //@ place
  Cache *to_k = p.cache[0] + place * p.width, *to_v = p.cache[1] + place * p.width;
  while (at < count) {
    store(to_k, at, of_k, factors[0]), store(to_v, at, of_v, factors[1]);  //@ v_scale
    at += blockDim.x;
    if (at < count) of_k.bits = k[at], of_v.bits = v[at];
  }
}

template <typename T, typename Cache>
void launch(const Append<T, Cache>& p) {
  require_vectors(p);
  const int count = p.width / Vector<T>::kCount;
  const int threads = std::min((count + 31) / 32 * 32, kMostThreads);
  vectors<<<p.tokens, threads, 0, p.stream>>>(p, count);
}

}  // namespace minfer

MINFER_KV_APPEND(kv_append_v02_vectors, minfer::launch)
