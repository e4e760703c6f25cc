// A window of keys, a soft cap, sinks, a tree of new tokens, pages of any power of two and up to 16 new tokens: what
// `minfer.decode_attention` takes and the op does not, and how a kernel that supports it registers a second torch op.
//
// Such a kernel's file defines `template <typename T, typename KV> void launch(const Decode<T, KV>&, const Scoring&)` and ends
// with `MINFER_SCORED_DECODE(decode_attention_<file name>, minfer::launch)`, which registers `decode_attention_<file name>`, as
// every kernel's file does, and `decode_attention_<file name>_scored`.
#pragma once

#include "decode_attention.h"

namespace minfer {

constexpr int kMostNew = 16;  // new tokens of a sequence
constexpr ScalarType kBool = static_cast<ScalarType>(11);  // no kernel computes with it, so `ops/op.h` does not name it

// A query sees only keys less than `window` positions away; 0: all up to its own. A softcap above 0 puts softcap * tanh(score /
// softcap) in the place of a score. Each head may have a sink, a score without a value. In a tree, a query sees all keys before
// the new tokens, and of the new tokens those that its mask names.
struct Scoring {
  int window = 0;
  float softcap = 0.0f;
  const float* sinks = nullptr;  // of each head; null: none
  const int* bits = nullptr;     // (batch, new): bit j of a query is new token j; null: flags
  const bool* flags = nullptr;   // (batch, new, new); null: a query sees the new tokens up to its own

  // Which new tokens a query sees, as bits.
  MINFER_EITHER unsigned seen_new(const Cached& p, int number, int query) const {
    const int64_t row = int64_t(number) * p.new_tokens + query;
    if (bits) return bits[row];
    if (!flags) return (2u << query) - 1;
    unsigned found = 0;
    for (int j = 0; j < p.new_tokens; ++j) found |= unsigned(flags[row * p.new_tokens + j]) << j;
    return found;
  }

  // The first key that a query sees. Without a window it would see the first `seen` keys, up to its own.
  MINFER_EITHER int first(int seen) const { return window > 0 && seen > window ? seen - window : 0; }
};

// Whether a query that sees the new tokens `mask` sees a key, without regard to a window.
MINFER_EITHER bool is_seen(const Cached& p, int keys, unsigned mask, int key) {
  const int fresh = key - (keys - p.new_tokens);  // which of the new tokens
  return fresh < 0 || (fresh < p.new_tokens && (mask >> fresh & 1));
}

inline Scoring make_scoring(const Tensor& q, const Tensor& sinks, const Tensor& mask, int64_t window, double softcap) {
  STD_TORCH_CHECK(window >= 0 && softcap >= 0, "decode_attention: window and softcap must not be negative");
  if (sinks.numel() > 0) check_sizes(sinks, "decode_attention: sinks", {q.size(2)});
  check_contiguous(sinks, "decode_attention: sinks");
  Scoring scoring;
  scoring.window = window > INT_MAX / 2 ? 0 : static_cast<int>(window);
  scoring.softcap = static_cast<float>(softcap);
  scoring.sinks = sinks.numel() > 0 ? input<float>(sinks, "decode_attention: sinks") : nullptr;
  if (mask.numel() == 0) return scoring;
  STD_TORCH_CHECK(window == 0, "decode_attention: a tree of new tokens must have no window");
  check_contiguous(mask, "decode_attention: mask");
  if (mask.dim() == 2) {
    check_sizes(mask, "decode_attention: mask", {q.size(0), q.size(1)});
    scoring.bits = input<int32_t>(mask, "decode_attention: mask");
  } else {
    check_sizes(mask, "decode_attention: mask", {q.size(0), q.size(1), q.size(1)});
    STD_TORCH_CHECK(mask.scalar_type() == kBool, "decode_attention: mask must be bool, or int32 (batch, new)");
    scoring.flags = static_cast<const bool*>(mask.const_data_ptr());
  }
  return scoring;
}

}  // namespace minfer

#define MINFER_SCORED_DECODE(NAME, LAUNCH)                                                                                \
  static void NAME##_scored(minfer::Tensor out, const minfer::Tensor q, const minfer::Tensor lengths,                    \
                            const minfer::Tensor page_table, const minfer::Tensor k_cache, const minfer::Tensor v_cache, \
                            const minfer::Tensor scales, const minfer::Tensor sinks, const minfer::Tensor mask,          \
                            double scale, int64_t window, double softcap) {                                              \
    const minfer::Scoring scoring = minfer::make_scoring(q, sinks, mask, window, softcap);                               \
    const auto launch = [&](const auto& p) { LAUNCH(p, scoring); };                                                      \
    minfer::dispatch(out, q, lengths, page_table, k_cache, v_cache, scales, scale, launch, {minfer::kMostNew, true});    \
  }                                                                                                                      \
  MINFER_OP(NAME##_scored, "(Tensor(a!) out, Tensor q, Tensor lengths, Tensor page_table, Tensor k_cache, "              \
                           "Tensor v_cache, Tensor scales, Tensor sinks, Tensor mask, float scale=0.0, int window=0, "   \
                           "float softcap=0.0) -> ()")                                                                   \
  MINFER_DECODE_ATTENTION(NAME, [](const auto& p) { LAUNCH(p, minfer::Scoring{}); })
