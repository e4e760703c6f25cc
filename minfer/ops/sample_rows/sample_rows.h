// What every CUDA and C++ kernel of sample_rows is given, and how it becomes a torch op. __init__.py says which token is drawn.
//
// A kernel file defines `template <typename T> void launch(const SampleRows<T>&)` and ends with
// `MINFER_SAMPLE_ROWS(sample_rows_<file name>, launch)`. T is float or bfloat16.
#pragma once

#include "ops/logits.h"

namespace minfer {

#ifdef __CUDACC__
__device__ const float kZero = 0.0f;  // in memory, because a local variable whose address is taken needs a stack
#endif

template <typename T>
struct SampleRows {
  Sample<T> all;  // all rows, without settings
  const float* temperature;  // this and the next three are null if all rows have the default
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;

  // One row as a problem of its own. With temperature 0 its random number is `*zero`, which draws the first kept token.
  MINFER_EITHER Sample<T> of(int row, const float* zero) const {
    Sample<T> p = all;
    p.rows = 1;
    p.tokens += row, p.logits += row * p.stride, p.u += row;
    // All settings are loaded before any is used, so that their latencies overlap.
    const float degrees = temperature ? temperature[row] : 1.0f;
    const int most = top_k ? top_k[row] : 0;
    const float share = top_p ? top_p[row] : 1.0f, least = min_p ? min_p[row] : 0.0f;
    const bool greedy = !(degrees > 0.0f);
    if (greedy) p.u = zero;
    p.scale = greedy ? 1.0f : 1.44269504f / degrees;
    p.top_k = greedy ? 1 : most > 0 && most < p.vocab ? most : 0;
    p.top_p = greedy || !(share < 1.0f) ? 1.0f : fmaxf(share, 0.0f);
    p.min_p_octaves = greedy || !(least > 0.0f) ? INFINITY : -log2f(fminf(least, 1.0f));
    return p;
  }
};

// The elements of a setting's tensor; null if it is empty.
template <typename T>
const T* setting(const Tensor& tensor, const char* who, int64_t rows) {
  check_contiguous(tensor, who);
  if (tensor.numel() == 0) return nullptr;
  check_sizes(tensor, who, {rows});
  return input<T>(tensor, who);
}

// Calls launch(SampleRows<T>) with the T of the logits. Without rows it does nothing.
template <typename Launch>
void dispatch_sample_rows(const Tensor& tokens, const Tensor& logits, const Tensor& u, const Tensor& temperature,
                          const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, Launch launch) {
  if (tokens.numel() == 0) return;
  STD_TORCH_CHECK(logits.numel() > 0, "sample_rows: logits must have a column");
  dispatch<float, BFloat16>(logits.scalar_type(), "sample_rows: logits", [&]<typename T>() {
    SampleRows<T> p{.all = make_sample<T>(tokens, logits, u, 1.0, 0, 1.0, 0.0)};
    p.temperature = setting<float>(temperature, "sample_rows: temperature", p.all.rows);
    p.top_k = setting<int32_t>(top_k, "sample_rows: top_k", p.all.rows);
    p.top_p = setting<float>(top_p, "sample_rows: top_p", p.all.rows);
    p.min_p = setting<float>(min_p, "sample_rows: min_p", p.all.rows);
    launch(p);
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_SAMPLE_ROWS(NAME, LAUNCH)                                                                               \
  static void NAME(minfer::Tensor tokens, const minfer::Tensor logits, const minfer::Tensor u,                         \
                   const minfer::Tensor temperature, const minfer::Tensor top_k, const minfer::Tensor top_p,           \
                   const minfer::Tensor min_p) {                                                                       \
    minfer::dispatch_sample_rows(tokens, logits, u, temperature, top_k, top_p, min_p, [](const auto& p) { LAUNCH(p); }); \
  }                                                                                                                    \
  MINFER_OP(NAME,                                                                                                      \
            "(Tensor(a!) tokens, Tensor logits, Tensor u, Tensor temperature, Tensor top_k, Tensor top_p, "            \
            "Tensor min_p) -> ()")
