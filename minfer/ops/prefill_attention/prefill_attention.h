// What every CUDA and C++ prefill_attention kernel is given, and how it becomes a torch op. `__init__.py` says what is
// computed.
//
// A kernel file defines `template <typename T> void launch(const Attention<T>&)` and ends with
// `MINFER_PREFILL_ATTENTION(prefill_attention_<file name>, minfer::launch)`. T is Half or BFloat16.
#pragma once

#include <cmath>

#include "ops/rows.h"

namespace minfer {

// One sequence: its first query and first key (0 where sequences are padded), and how many it has of each.
struct Sequence {
  int first_q, queries, first_kv, keys;
};

// The keys from `begin` to before `end`.
struct Span {
  int begin, end;
};

template <typename T>
struct Attention {
  Rows<T> out;  // (batch, seq, heads, v_dim); of packed sequences (tokens, heads, v_dim), where of_outer is 0
  Rows<const T> q, k, v;
  float* lse;  // null if nobody asks for it
  int64_t lse_batch, lse_head;  // its strides; tokens are contiguous
  const int *q_seqlens, *kv_seqlens;  // null: every sequence has seq_q queries and seq_kv keys
  bool packed;
  int batch, heads, kv_heads, dim;
  int seq_q, seq_kv;  // the longest that a sequence may be; all tokens where sequences are packed
  bool causal;
  int window;  // 0: none
  float softcap, scale;  // softcap 0: none
  int v_dim;             // the length of rows of v and out
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  // Lengths that do not fit the tensors are clamped.
  MINFER_EITHER Sequence sequence(int number) const {
    const auto limit = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    if (!packed)
      return {0, q_seqlens ? limit(q_seqlens[number], 0, seq_q) : seq_q, 0,
              kv_seqlens ? limit(kv_seqlens[number], 0, seq_kv) : seq_kv};
    const int q0 = limit(q_seqlens[number], 0, seq_q), k0 = limit(kv_seqlens[number], 0, seq_kv);
    return {q0, limit(q_seqlens[number + 1], q0, seq_q) - q0, k0, limit(kv_seqlens[number + 1], k0, seq_kv) - k0};
  }

  // The keys, of `keys` in all, that the query at this position sees; none where begin >= end.
  MINFER_EITHER Span span_at(int position, int keys) const {
    const int first = position - window + 1, behind = position + (causal ? 1 : window);
    return {window && first > 0 ? first : 0, (causal || window) && behind < keys ? behind : keys};
  }
  MINFER_EITHER Span span(const Sequence& s, int query) const { return span_at(query + s.keys - s.queries, s.keys); }

  // How many rows of q and out a sequence has in memory: its queries and, in a padded batch, its padding.
  MINFER_EITHER int rows(const Sequence& s) const { return packed ? s.queries : seq_q; }

  MINFER_EITHER int kv_head(int head) const { return head / (heads / kv_heads); }
  MINFER_EITHER float* lse_at(int number, const Sequence& s, int query, int head) const {
    return lse + number * lse_batch + head * lse_head + s.first_q + query;
  }
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const Attention<T>& p) {
  check_rows_in_pieces(p.out, p.v_dim, "prefill_attention: out"), check_rows_in_pieces(p.q, p.dim, "prefill_attention: q");
  check_rows_in_pieces(p.k, p.dim, "prefill_attention: k"), check_rows_in_pieces(p.v, p.v_dim, "prefill_attention: v");
}

// Of four dimensions, or of three where sequences are packed.
template <typename Element>
Rows<Element> make_heads(const Tensor& tensor, Element* begin, const char* who) {
  if (tensor.dim() == 4) return make_rows(tensor, begin, who);
  check_rank(tensor, who, 3), check_rows(tensor, who);
  return {begin, 0, stride_or_0(tensor, 0), stride_or_0(tensor, 1)};
}

template <typename T>
Attention<T> make_attention(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& q_seqlens, const Tensor& kv_seqlens, bool causal, int64_t window,
                            double softcap, double scale) {
  const bool packed = q.dim() == 3;
  STD_TORCH_CHECK(packed || q.dim() == 4, "prefill_attention: q must have 3 or 4 dimensions, got ", q.dim());
  check_rank(k, "prefill_attention: k", q.dim()), check_rank(v, "prefill_attention: v", q.dim());
  const int64_t last = q.dim() - 1, batch = packed ? q_seqlens.numel() - 1 : q.size(0), dim = q.size(last);
  const int64_t v_dim = v.size(last);
  const int64_t heads = q.size(last - 1), kv_heads = k.size(last - 1), seq_q = q.size(last - 2), seq_kv = k.size(last - 2);
  const int64_t counts = packed ? batch + 1 : q_seqlens.numel() == 0 ? 0 : batch;
  if (packed) {
    check_sizes(out, "prefill_attention: out", {seq_q, heads, v_dim});
    check_sizes(k, "prefill_attention: k", {seq_kv, kv_heads, dim});
    check_sizes(v, "prefill_attention: v", {seq_kv, kv_heads, v_dim});
    STD_TORCH_CHECK(batch >= 0, "prefill_attention: q_seqlens of packed sequences must have at least one element");
    if (lse.numel() > 0) check_sizes(lse, "prefill_attention: lse", {heads, seq_q});
  } else {
    check_sizes(out, "prefill_attention: out", {batch, seq_q, heads, v_dim});
    check_sizes(k, "prefill_attention: k", {batch, seq_kv, kv_heads, dim});
    check_sizes(v, "prefill_attention: v", {batch, seq_kv, kv_heads, v_dim});
    if (lse.numel() > 0) check_sizes(lse, "prefill_attention: lse", {batch, heads, seq_q});
  }
  check_sizes(q_seqlens, "prefill_attention: q_seqlens", {counts});
  check_sizes(kv_seqlens, "prefill_attention: kv_seqlens", {counts});
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "prefill_attention: q must have a multiple of the ", kv_heads,
                  " heads of k, got ", heads);
  STD_TORCH_CHECK(dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256,
                  "prefill_attention: q must have a head_dim of 64, 96, 128, 192 or 256, got ", dim);
  STD_TORCH_CHECK(v_dim == dim || (dim == 192 && v_dim == 128),
                  "prefill_attention: v must have the head_dim of q, ", dim, ", or 128 where that is 192, got ", v_dim);
  STD_TORCH_CHECK(window >= 0 && softcap >= 0 && scale >= 0, "prefill_attention: window, softcap and scale must not be negative");
  check_contiguous(lse, "prefill_attention: lse");
  check_contiguous(q_seqlens, "prefill_attention: q_seqlens"), check_contiguous(kv_seqlens, "prefill_attention: kv_seqlens");

  Attention<T> p;
  p.out = make_heads(out, output<T>(out, "prefill_attention: out"), "prefill_attention: out");
  p.q = make_heads(q, input<T>(q, "prefill_attention: q"), "prefill_attention: q");
  p.k = make_heads(k, input<T>(k, "prefill_attention: k"), "prefill_attention: k");
  p.v = make_heads(v, input<T>(v, "prefill_attention: v"), "prefill_attention: v");
  p.lse = lse.numel() > 0 ? output<float>(lse, "prefill_attention: lse") : nullptr;
  p.lse_batch = packed ? 0 : heads * seq_q, p.lse_head = seq_q;
  p.q_seqlens = counts ? input<int32_t>(q_seqlens, "prefill_attention: q_seqlens") : nullptr;
  p.kv_seqlens = counts ? input<int32_t>(kv_seqlens, "prefill_attention: kv_seqlens") : nullptr;
  p.packed = packed, p.causal = causal;
  p.batch = to_int(batch, "prefill_attention: q"), p.dim = static_cast<int>(dim), p.v_dim = static_cast<int>(v_dim);
  p.heads = to_int(heads, "prefill_attention: q"), p.kv_heads = to_int(kv_heads, "prefill_attention: k");
  p.seq_q = to_int(seq_q, "prefill_attention: q"), p.seq_kv = to_int(seq_kv, "prefill_attention: k");
  // A window longer than all tokens hides nothing, and becomes 0: with smaller ones, sums of positions fit 32 bits.
  STD_TORCH_CHECK(seq_q + seq_kv <= INT_MAX / 4, "prefill_attention: q and k must have fewer than 2^29 tokens together");
  p.window = window > seq_q + seq_kv ? 0 : static_cast<int>(window);
  p.softcap = static_cast<float>(softcap), p.scale = static_cast<float>(scale > 0 ? scale : 1 / std::sqrt(double(dim)));
#ifdef __CUDACC__
  p.stream = stream_of(q);
#endif
  return p;
}

// Calls launch(Attention<T>) with the T of the tensors; an empty out is no work.
template <typename Launch>
void dispatch(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& q_seqlens, const Tensor& kv_seqlens, bool causal, int64_t window, double softcap,
              double scale, Launch launch) {
  dispatch<Half, BFloat16>(q.scalar_type(), "prefill_attention: q", [&]<typename T>() {
    const Attention<T> p = make_attention<T>(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale);
    if (out.numel() > 0) launch(p);
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_PREFILL_ATTENTION(NAME, LAUNCH)                                                                             \
  static void NAME(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor q, const minfer::Tensor k,                \
                   const minfer::Tensor v, const minfer::Tensor q_seqlens, const minfer::Tensor kv_seqlens, bool causal,  \
                   int64_t window, double softcap, double scale) {                                                        \
    minfer::dispatch(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale,                            \
                     [](const auto& p) { LAUNCH(p); });                                                                   \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor q_seqlens, Tensor kv_seqlens, "  \
                  "bool causal=True, int window=0, float softcap=0.0, float scale=0.0) -> ()")
