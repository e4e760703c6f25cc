// v01_naive: a thread for each element of h = silu(x Wg) * (x Wu), then a thread for each element of out; no tensor cores.
// Idea: the definition in two kernels. A slot's expert is in `indices`, so nothing is sorted; each slot reads its weights.
// Expected: bound by the load units, as hgemm's v01: a few hundred GFLOP/s; each weight is loaded once for each token of its
// expert.
#include "cuda/counters.cuh"
#include "moe_ffn.h"

namespace minfer {

template <typename T>
__global__ void between(Experts<T> p, float* h) {
  const int64_t f = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int slot = blockIdx.y; slot < p.slots; slot += gridDim.y) {
    const int64_t expert = p.indices[slot];
    if (f >= p.ffn || expert < 0 || expert >= p.experts) continue;
    const T* x = p.x + slot / p.k * p.ldx;
    const T *gate = p.gate_up + (expert * 2 * p.ffn + f) * p.hidden, *up = gate + int64_t(p.ffn) * p.hidden;
    float one = 0.0f, other = 0.0f;
    for (int i = 0; i < p.hidden; ++i) {
      const float value = float(x[i]);
      one += value * float(gate[i]), other += value * float(up[i]);
    }
    h[slot * int64_t(p.ffn) + f] = swiglu(one, other);
  }
}

template <typename T>
__global__ void gathered(Experts<T> p, const float* h) {
  const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    if (col >= p.hidden) continue;
    float out = 0.0f;
    for (int slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
      const int64_t expert = p.indices[slot];
      if (expert < 0 || expert >= p.experts) continue;
      const T* down = p.down + (expert * p.hidden + col) * p.ffn;
      float sum = 0.0f;
      for (int f = 0; f < p.ffn; ++f) sum += h[slot * int64_t(p.ffn) + f] * float(down[f]);
      out += p.weights[slot] * sum;
    }
    p.out[token * p.ldo + col] = T(out);
  }
}

template <typename T>
void launch(const Experts<T>& p) {
  constexpr int kThreads = 128;
  const auto h = scratch_words(int64_t(p.slots) * p.ffn);
  float* between_them = static_cast<float*>(h.mutable_data_ptr());
  const auto blocks = [](int across, int down) {
    return dim3((across + kThreads - 1) / kThreads, down < 65535 ? down : 65535);
  };
  between<<<blocks(p.ffn, p.slots), kThreads, 0, p.stream>>>(p, between_them);
  gathered<<<blocks(p.hidden, p.tokens), kThreads, 0, p.stream>>>(p, between_them);
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_v01_naive, minfer::launch)
