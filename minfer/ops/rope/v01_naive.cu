// v01_naive: one block a token, one pair a thread, one element a load.
// Idea: the definition, nothing else; neighbouring threads take neighbouring pairs.
// Expected: half of the memory's speed or less: a warp asks for 64 bytes at once of a half type, each pair is found by a
// division, and cosine and sine are loaded anew for every head.
// Measured (H200, float32, counted, out, batch=32, seq=2048, heads=8, kv_heads=0, head_dim=256, rotary_dim=256): 2843 GB/s
//   cold; 522.5 % of torch.
#include "rope.h"

namespace minfer {

constexpr int kThreads = 256;

template <bool kBackward, bool kInterleaved, typename T>
__global__ void __launch_bounds__(kThreads) naive(Rope<T> p) {
  const int token = blockIdx.x % p.seq, batch = blockIdx.x / p.seq;
  const int row = p.position(batch, token);
  for (int i = threadIdx.x; i < p.all_heads() * p.half; i += kThreads) {
    const int head = i / p.half, pair = i % p.half;
    p.with_head(batch, token, head, [&](const T* from, T* to) {
      const int first = kInterleaved ? 2 * pair : pair, second = kInterleaved ? first + 1 : pair + p.half;
      float a = float(from[first]), b = float(from[second]);
      const float cos = !p.has_row(row) ? NAN : p.cos[row * p.cos_stride + pair];
      const float sin = !p.has_row(row) ? NAN : p.sin[row * p.sin_stride + pair];
      rotate_pair(a, b, cos, kBackward ? -sin : sin);
      to[first] = T(a), to[second] = T(b);
    });
  }
  const int rest = p.in_place ? 0 : p.dim - 2 * p.half;
  for (int i = threadIdx.x; i < p.all_heads() * rest; i += kThreads)
    p.with_head(batch, token, i / rest, [&](const T* from, T* to) {
      const int at = 2 * p.half + i % rest;
      to[at] = from[at];
    });
}

struct Naive {
  template <bool kBackward, bool kInterleaved, typename T>
  static void run(const Rope<T>& p) {
    STD_TORCH_CHECK(int64_t(p.batch) * p.seq <= INT_MAX, "rope: q_out must have fewer than 2^31 tokens");
    naive<kBackward, kInterleaved, T><<<p.batch * p.seq, kThreads, 0, p.stream>>>(p);
  }
};

}  // namespace minfer

MINFER_ROPE(rope_v01_naive, minfer::Naive)
