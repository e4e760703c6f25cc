// A window of keys, a soft cap and sinks: arguments of `minfer.decode_attention` that the op does not have, and how a
// kernel that supports them registers a second torch op.
//
// Such a kernel's file defines `template <typename T, typename KV> void launch(const Decode<T, KV>&, const Scoring&)` and ends
// with `MINFER_SCORED_DECODE(decode_attention_<file name>, minfer::launch)`, which registers `decode_attention_<file name>`, as
// every kernel's file does, and `decode_attention_<file name>_scored`.
#pragma once

#include "decode_attention.h"

namespace minfer {

// A query sees only keys less than `window` positions away; 0: all up to its own. A softcap above 0 puts softcap * tanh(score /
// softcap) in the place of a score. Each head may have a sink, a score without a value.
struct Scoring {
  int window = 0;
  float softcap = 0.0f;
  const float* sinks = nullptr;  // of each head; null: none

  // The first key that a query sees. Without a window it would see the first `seen` keys, up to its own.
  MINFER_EITHER int first(int seen) const { return window > 0 && seen > window ? seen - window : 0; }
};

inline Scoring make_scoring(const Tensor& q, const Tensor& sinks, int64_t window, double softcap) {
  STD_TORCH_CHECK(window >= 0 && softcap >= 0, "decode_attention: window and softcap must not be negative");
  if (sinks.numel() > 0) check_sizes(sinks, "decode_attention: sinks", {q.size(2)});
  check_contiguous(sinks, "decode_attention: sinks");
  Scoring scoring;
  scoring.window = window > INT_MAX / 2 ? 0 : static_cast<int>(window);
  scoring.softcap = static_cast<float>(softcap);
  scoring.sinks = sinks.numel() > 0 ? input<float>(sinks, "decode_attention: sinks") : nullptr;
  return scoring;
}

}  // namespace minfer

#define MINFER_SCORED_DECODE(NAME, LAUNCH)                                                                                \
  static void NAME##_scored(minfer::Tensor out, const minfer::Tensor q, const minfer::Tensor lengths,                    \
                            const minfer::Tensor page_table, const minfer::Tensor k_cache, const minfer::Tensor v_cache, \
                            const minfer::Tensor scales, const minfer::Tensor sinks, double scale, int64_t window,       \
                            double softcap) {                                                                            \
    const minfer::Scoring scoring = minfer::make_scoring(q, sinks, window, softcap);                                     \
    minfer::dispatch(out, q, lengths, page_table, k_cache, v_cache, scales, scale,                                       \
                     [&](const auto& p) { LAUNCH(p, scoring); });                                                        \
  }                                                                                                                      \
  MINFER_OP(NAME##_scored, "(Tensor(a!) out, Tensor q, Tensor lengths, Tensor page_table, Tensor k_cache, "              \
                           "Tensor v_cache, Tensor scales, Tensor sinks, float scale=0.0, int window=0, "                \
                           "float softcap=0.0) -> ()")                                                                   \
  MINFER_DECODE_ATTENTION(NAME, [](const auto& p) { LAUNCH(p, minfer::Scoring{}); })
