// v03_few_rows: rows of 4096 or 8192 for few tokens, where latency decides: the sizes are compiled in.
// Idea: when the GPU is idle, a row costs the launch, the instructions up to the first load, one round trip of loads, one
// barrier, and one of stores, and each line of code that is not in a cache yet costs a round trip, too. Without bounds to
// check, and with sums that each thread adds up itself behind the barrier, the code is a third of v02_vectors'. How many
// threads a row takes, of which bytes each, and whether the weight is loaded with the row or behind the barrier are
// variants, registered one by one.
// Expected: 5 us instead of 5.6 at 128 tokens of 4096 in bfloat16. Measured: see docs/rmsnorm.md.
#include "cuda/vector.cuh"
#include "rmsnorm.h"

namespace minfer {

// kBytes of a row as one load or store.
template <typename T, int kBytes>
struct Piece {
  using Bits = std::conditional_t<kBytes == 16, uint4, uint2>;
  using Pair = typename Vector<T>::Pair;
  static constexpr int kWords = kBytes / 4, kCount = kBytes / int(sizeof(T));
  Bits bits;

  __device__ void unpack(float (&values)[kCount]) const {
    const uint32_t* words = &bits.x;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = to_floats(reinterpret_cast<const Pair&>(words[i]));
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ void pack(const float (&values)[kCount]) {
    uint32_t* words = &bits.x;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) words[i] = __float_as_uint(values[i]);
      else round_to(reinterpret_cast<Pair&>(words[i]), values[2 * i], values[2 * i + 1]);
    }
  }
};

// A row is kThreads * kPieces pieces, no more and no less.
template <typename T, int kThreads, int kBytes, bool kLate, int kPieces>
__global__ void __launch_bounds__(kThreads) exact(RmsNorm<T> p) {
  using P = Piece<T, kBytes>;
  __shared__ float4 partial[kThreads / 128];
  const auto* from = reinterpret_cast<const typename P::Bits*>(p.x + blockIdx.x * p.x_stride) + threadIdx.x;
  const auto* weights = reinterpret_cast<const typename P::Bits*>(p.weight) + threadIdx.x;
  P x[kPieces], weight[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) x[i].bits = from[i * kThreads];
  if constexpr (!kLate) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) weight[i].bits = weights[i * kThreads];
  }
  float sum = 0.0f, values[P::kCount], factors[P::kCount];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    x[i].unpack(values);
#pragma unroll
    for (float value : values) sum += value * value;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(partial)[threadIdx.x / 32] = sum;
  __syncthreads();
  if constexpr (kLate) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) weight[i].bits = weights[i * kThreads];
  }
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 128; ++i) sum += (partial[i].x + partial[i].y) + (partial[i].z + partial[i].w);
  const float scale = rsqrtf(sum * p.share + p.eps);
  auto* to = reinterpret_cast<typename P::Bits*>(p.y + blockIdx.x * p.y_stride) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    x[i].unpack(values), weight[i].unpack(factors);
#pragma unroll
    for (int j = 0; j < P::kCount; ++j) values[j] *= scale * factors[j];
    x[i].pack(values);
    to[i * kThreads] = x[i].bits;
  }
}

template <int kThreads, int kBytes, bool kLate, typename T>
void launch(const RmsNorm<T>& p) {
  require_vectors(p);
  STD_TORCH_CHECK(p.hidden == 4096 || p.hidden == 8192, "rmsnorm: x must have 4096 or 8192 elements in a row, got ",
                  p.hidden);
  constexpr int kOf4096 = 4096 * sizeof(T) / (kThreads * kBytes);
  if (p.hidden == 4096) exact<T, kThreads, kBytes, kLate, kOf4096><<<p.tokens, kThreads, 0, p.stream>>>(p);
  else exact<T, kThreads, kBytes, kLate, 2 * kOf4096><<<p.tokens, kThreads, 0, p.stream>>>(p);
}

template <typename T>
void threads_128(const RmsNorm<T>& p) {
  launch<128, 16, false>(p);
}
template <typename T>
void threads_256(const RmsNorm<T>& p) {
  launch<256, 16, false>(p);
}
template <typename T>
void threads_256_late(const RmsNorm<T>& p) {
  launch<256, 16, true>(p);
}
template <typename T>
void threads_512(const RmsNorm<T>& p) {
  launch<512, 16, false>(p);
}
template <typename T>
void threads_512_late(const RmsNorm<T>& p) {
  launch<512, 16, true>(p);
}
template <typename T>
void threads_1024(const RmsNorm<T>& p) {
  launch<1024, 8, false>(p);
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_v03_threads_128, minfer::threads_128)
MINFER_RMSNORM(rmsnorm_v03_threads_256, minfer::threads_256)
MINFER_RMSNORM(rmsnorm_v03_threads_256_late, minfer::threads_256_late)
MINFER_RMSNORM(rmsnorm_v03_threads_512, minfer::threads_512)
MINFER_RMSNORM(rmsnorm_v03_threads_512_late, minfer::threads_512_late)
MINFER_RMSNORM(rmsnorm_v03_threads_1024, minfer::threads_1024)
