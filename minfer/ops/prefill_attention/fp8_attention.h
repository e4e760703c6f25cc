// Keys and values in e4m3, which keep value / scale. A kernel that reads them takes Fp8Attention<Attention<T>> or, of pages,
// Fp8Attention<PagedAttention<T>>, and ends with MINFER_FP8_PREFILL_ATTENTION.
#pragma once

#include "prefill_attention.h"

namespace minfer {

template <typename Base>
struct Fp8Attention : Base {
  Rows<const Float8E4M3> k, v;  // hide Base's k and v, which point to the same memory as T
  const float* scales;          // of k and of v

  Fp8Attention(const Base& base, const float* scales) : Base(base), k(in_bytes(base.k)), v(in_bytes(base.v)), scales(scales) {}

  template <typename T>
  static Rows<const Float8E4M3> in_bytes(const Rows<const T>& rows) {
    return {reinterpret_cast<const Float8E4M3*>(rows.begin), rows.of_outer, rows.of_inner, rows.of_head};
  }

  MINFER_EITHER const Float8E4M3* row_of(const Rows<const Float8E4M3>& rows, int number, const Sequence& s, int key,
                                         int head) const {
    if constexpr (Base::kPaged) return this->at_place(rows, this->place_of(number, key), head);
    else return rows.at(number, s.first_kv + key, head);
  }
  MINFER_EITHER const Float8E4M3* k_at(int number, const Sequence& s, int key, int head) const {
    return row_of(k, number, s, key, head);
  }
  MINFER_EITHER const Float8E4M3* v_at(int number, const Sequence& s, int key, int head) const {
    return row_of(v, number, s, key, head);
  }
};

// Calls launch(Fp8Attention<…>), of PagedAttention if the table has columns, else of Attention. An empty out is no work.
template <typename Launch>
void dispatch_fp8(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& page_table, const Tensor& k,
                  const Tensor& v, const Tensor& q_seqlens, const Tensor& kv_seqlens, const Tensor& scales, bool causal,
                  int64_t window, double softcap, double scale, Launch launch) {
  check_rank(page_table, "prefill_attention: page_table", 2);
  check_sizes(scales, "prefill_attention: scales", {2}), check_contiguous(scales, "prefill_attention: scales");
  const float* factors = input<float>(scales, "prefill_attention: scales");
  const auto run = [&](const auto& p) {
    if (out.numel() > 0) launch(Fp8Attention(p, factors));
  };
  dispatch<Half, BFloat16>(q.scalar_type(), "prefill_attention: q", [&]<typename T>() {
    if (page_table.size(1) > 0)
      run(make_paged_attention<T, Float8E4M3>(out, lse, q, page_table, k, v, q_seqlens, kv_seqlens, causal, window, softcap,
                                              scale));
    else
      run(make_attention<T, Float8E4M3>(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_FP8_PREFILL_ATTENTION(NAME, LAUNCH)                                                                         \
  static void NAME(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor q, const minfer::Tensor page_table,       \
                   const minfer::Tensor k, const minfer::Tensor v, const minfer::Tensor q_seqlens,                        \
                   const minfer::Tensor kv_seqlens, const minfer::Tensor scales, bool causal, int64_t window,             \
                   double softcap, double scale) {                                                                        \
    minfer::dispatch_fp8(out, lse, q, page_table, k, v, q_seqlens, kv_seqlens, scales, causal, window, softcap, scale,    \
                         [](const auto& p) { LAUNCH(p); });                                                               \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor page_table, Tensor k, Tensor v, Tensor q_seqlens, "  \
                  "Tensor kv_seqlens, Tensor scales, bool causal=True, int window=0, float softcap=0.0, "                 \
                  "float scale=0.0) -> ()")
