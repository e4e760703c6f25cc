// What every CUDA and C++ sample kernel is given, and how it becomes a torch op. Which token is drawn: __init__.py.
//
// A kernel file defines `template <typename T> void launch(const Sample<T>&)` and ends with
// `MINFER_SAMPLE(sample_<file name>, launch)`. T is float or bfloat16.
#pragma once

#include "ops/logits.h"

namespace minfer {

// Calls launch(Sample<T>) with the T of the logits; no rows are no work.
template <typename Launch>
void dispatch_sample(const Tensor& tokens, const Tensor& logits, const Tensor& u, double temperature, int64_t top_k,
                     double top_p, double min_p, Launch launch) {
  if (tokens.numel() == 0) return;
  STD_TORCH_CHECK(logits.numel() > 0, "sample: logits must have a column");
  dispatch<float, BFloat16>(logits.scalar_type(), "sample: logits", [&]<typename T>() {
    launch(make_sample<T>(tokens, logits, u, temperature, top_k, top_p, min_p));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_SAMPLE(NAME, LAUNCH)                                                                                  \
  static void NAME(minfer::Tensor tokens, const minfer::Tensor logits, const minfer::Tensor u, double temperature,   \
                   int64_t top_k, double top_p, double min_p) {                                                      \
    minfer::dispatch_sample(tokens, logits, u, temperature, top_k, top_p, min_p, [](const auto& p) { LAUNCH(p); });  \
  }                                                                                                                  \
  MINFER_OP(NAME,                                                                                                    \
            "(Tensor(a!) tokens, Tensor logits, Tensor u, float temperature=1.0, int top_k=0, float top_p=1.0, "     \
            "float min_p=0.0) -> ()")
