// What every CUDA and C++ prefill_attention kernel is given, and how it becomes a torch op. `__init__.py` says what is
// computed.
//
// A kernel file defines `template <typename T> void launch(const Attention<T>&)` and ends with
// `MINFER_PREFILL_ATTENTION(prefill_attention_<file name>, minfer::launch)`. T is Half or BFloat16. One that reads pages takes
// PagedAttention<T>, and ends with MINFER_PAGED_PREFILL_ATTENTION.
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
  using Element = T;
  static constexpr bool kPaged = false;
  Rows<T> out;  // (batch, seq, heads, v_dim); of packed sequences (tokens, heads, v_dim), where of_outer is 0
  Rows<const T> q, k, v;
  float* lse;  // null if nobody asks for it
  int64_t lse_batch, lse_head;  // its strides; tokens are contiguous
  const int *q_seqlens, *kv_seqlens;  // null: every sequence has seq_q queries, or seq_kv keys
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
  MINFER_EITHER const T* k_at(int number, const Sequence& s, int key, int head) const {
    return k.at(number, s.first_kv + key, head);
  }
  MINFER_EITHER const T* v_at(int number, const Sequence& s, int key, int head) const {
    return v.at(number, s.first_kv + key, head);
  }
  // k and v are (blocks, slots, kv_heads, …).
  int blocks() const { return packed ? 1 : batch; }
  int slots() const { return seq_kv; }

  MINFER_EITHER float* lse_at(int number, const Sequence& s, int query, int head) const {
    return lse + number * lse_batch + head * lse_head + s.first_q + query;
  }
};

// Keys and values in pages: key j of sequence b is slot j % slots of page page_table[b, j / slots]. seq_kv is how many keys the
// table has room for; kv_seqlens has a length for each sequence, also where queries are packed.
template <typename T>
struct PagedAttention : Attention<T> {
  static constexpr bool kPaged = true;
  const int* page_table;
  int64_t table_stride;
  int pages, log_slots;

  int blocks() const { return pages; }
  MINFER_EITHER int slots() const { return 1 << log_slots; }

  MINFER_EITHER Sequence sequence(int number) const {
    const auto limit = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    const int *q = this->q_seqlens, most = this->seq_q, keys = limit(this->kv_seqlens[number], 0, this->seq_kv);
    if (!this->packed) return {0, q ? limit(q[number], 0, most) : most, 0, keys};
    const int first = limit(q[number], 0, most);
    return {first, limit(q[number + 1], first, most) - first, 0, keys};
  }

  // The entry of the table that has the page of a key; and the place of the key among all slots, from the page. A page out of
  // range becomes page 0, so that nothing is read out of bounds.
  MINFER_EITHER const int* entry_of(int number, int key) const {
    return page_table + number * table_stride + (key >> log_slots);
  }
  MINFER_EITHER int place_in(int page, int key) const {
    return ((unsigned(page) < unsigned(pages) ? page : 0) << log_slots) + (key & slots() - 1);
  }
  MINFER_EITHER int place_of(int number, int key) const { return place_in(*entry_of(number, key), key); }
  template <typename Row>
  MINFER_EITHER Row* at_place(const Rows<Row>& rows, int place, int head) const {
    return rows.at(place >> log_slots, place & slots() - 1, head);
  }
  MINFER_EITHER const T* k_at(int number, const Sequence&, int key, int head) const {
    return at_place(this->k, place_of(number, key), head);
  }
  MINFER_EITHER const T* v_at(int number, const Sequence&, int key, int head) const {
    return at_place(this->v, place_of(number, key), head);
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

// Sets what all problems have. q_seqlens and kv_seqlens must have so many elements; k and v are checked before, and have
// elements of type KV: where that is not T, p has their addresses and strides.
template <typename KV, typename T>
void set_attention(Attention<T>& p, const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& q_seqlens, const Tensor& kv_seqlens, int64_t q_counts, int64_t kv_counts, int64_t seq_kv,
                   bool causal, int64_t window, double softcap, double scale) {
  const bool packed = q.dim() == 3;
  const int64_t last = q.dim() - 1, batch = packed ? q_seqlens.numel() - 1 : q.size(0), dim = q.size(last);
  const int64_t v_dim = v.size(v.dim() - 1);
  const int64_t heads = q.size(last - 1), kv_heads = k.size(k.dim() - 2), seq_q = q.size(last - 2);
  if (packed) {
    check_sizes(out, "prefill_attention: out", {seq_q, heads, v_dim});
    STD_TORCH_CHECK(batch >= 0, "prefill_attention: q_seqlens of packed sequences must have at least one element");
    if (lse.numel() > 0) check_sizes(lse, "prefill_attention: lse", {heads, seq_q});
  } else {
    check_sizes(out, "prefill_attention: out", {batch, seq_q, heads, v_dim});
    if (lse.numel() > 0) check_sizes(lse, "prefill_attention: lse", {batch, heads, seq_q});
  }
  check_sizes(q_seqlens, "prefill_attention: q_seqlens", {q_counts});
  check_sizes(kv_seqlens, "prefill_attention: kv_seqlens", {kv_counts});
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "prefill_attention: q must have a multiple of the ", kv_heads,
                  " heads of k, got ", heads);
  STD_TORCH_CHECK(dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256,
                  "prefill_attention: q must have a head_dim of 64, 96, 128, 192 or 256, got ", dim);
  STD_TORCH_CHECK(v_dim == dim || (dim == 192 && v_dim == 128),
                  "prefill_attention: v must have the head_dim of q, ", dim, ", or 128 where that is 192, got ", v_dim);
  STD_TORCH_CHECK(window >= 0 && softcap >= 0 && scale >= 0, "prefill_attention: window, softcap and scale must not be negative");
  check_contiguous(lse, "prefill_attention: lse");
  check_contiguous(q_seqlens, "prefill_attention: q_seqlens"), check_contiguous(kv_seqlens, "prefill_attention: kv_seqlens");

  p.out = make_heads(out, output<T>(out, "prefill_attention: out"), "prefill_attention: out");
  p.q = make_heads(q, input<T>(q, "prefill_attention: q"), "prefill_attention: q");
  p.k = make_heads(k, reinterpret_cast<const T*>(input<KV>(k, "prefill_attention: k")), "prefill_attention: k");
  p.v = make_heads(v, reinterpret_cast<const T*>(input<KV>(v, "prefill_attention: v")), "prefill_attention: v");
  p.lse = lse.numel() > 0 ? output<float>(lse, "prefill_attention: lse") : nullptr;
  p.lse_batch = packed ? 0 : heads * seq_q, p.lse_head = seq_q;
  p.q_seqlens = q_counts ? input<int32_t>(q_seqlens, "prefill_attention: q_seqlens") : nullptr;
  p.kv_seqlens = kv_counts ? input<int32_t>(kv_seqlens, "prefill_attention: kv_seqlens") : nullptr;
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
}

inline int64_t check_queries(const Tensor& q, const Tensor& q_seqlens) {
  STD_TORCH_CHECK(q.dim() == 3 || q.dim() == 4, "prefill_attention: q must have 3 or 4 dimensions, got ", q.dim());
  return q.dim() == 3 ? q_seqlens.numel() : q_seqlens.numel() == 0 ? 0 : q.size(0);
}

template <typename T, typename KV = T>
Attention<T> make_attention(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& q_seqlens, const Tensor& kv_seqlens, bool causal, int64_t window,
                            double softcap, double scale) {
  const int64_t counts = check_queries(q, q_seqlens), last = q.dim() - 1, dim = q.size(last);
  const int64_t kv_counts = q.dim() == 3 ? counts : kv_seqlens.numel() == 0 ? 0 : q.size(0);
  check_rank(k, "prefill_attention: k", q.dim()), check_rank(v, "prefill_attention: v", q.dim());
  const int64_t kv_heads = k.size(last - 1), seq_kv = k.size(last - 2), v_dim = v.size(last);
  if (q.dim() == 3) {
    check_sizes(k, "prefill_attention: k", {seq_kv, kv_heads, dim});
    check_sizes(v, "prefill_attention: v", {seq_kv, kv_heads, v_dim});
  } else {
    check_sizes(k, "prefill_attention: k", {q.size(0), seq_kv, kv_heads, dim});
    check_sizes(v, "prefill_attention: v", {q.size(0), seq_kv, kv_heads, v_dim});
  }
  Attention<T> p;
  set_attention<KV>(p, out, lse, q, k, v, q_seqlens, kv_seqlens, counts, kv_counts, seq_kv, causal, window, softcap, scale);
  return p;
}

template <typename T, typename KV = T>
PagedAttention<T> make_paged_attention(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& page_table,
                                       const Tensor& k, const Tensor& v, const Tensor& q_seqlens, const Tensor& kv_seqlens,
                                       bool causal, int64_t window, double softcap, double scale) {
  const int64_t counts = check_queries(q, q_seqlens), batch = q.dim() == 3 ? counts - 1 : q.size(0);
  check_rank(k, "prefill_attention: k", 4), check_rank(v, "prefill_attention: v", 4);
  check_rank(page_table, "prefill_attention: page_table", 2);
  const int64_t pages = k.size(0), slots = k.size(1), kv_heads = k.size(2), columns = page_table.size(1);
  check_sizes(k, "prefill_attention: k", {pages, slots, kv_heads, q.size(q.dim() - 1)});
  check_sizes(v, "prefill_attention: v", {pages, slots, kv_heads, v.size(3)});
  check_sizes(page_table, "prefill_attention: page_table", {batch, columns});
  check_rows(page_table, "prefill_attention: page_table");
  STD_TORCH_CHECK(slots > 0 && (slots & slots - 1) == 0 && slots <= 1 << 29,
                  "prefill_attention: k must have pages whose slots are a power of two, got ", slots);
  STD_TORCH_CHECK(pages * slots <= INT_MAX, "prefill_attention: k must have fewer than 2^31 slots");
  PagedAttention<T> p;
  const int64_t seq_kv = pages > 0 ? columns * slots : 0;
  set_attention<KV>(p, out, lse, q, k, v, q_seqlens, kv_seqlens, counts, batch, seq_kv, causal, window, softcap, scale);
  p.page_table = input<int32_t>(page_table, "prefill_attention: page_table");
  p.table_stride = batch > 1 ? page_table.stride(0) : 0;
  p.pages = static_cast<int>(pages), p.log_slots = 0;
  while (int64_t(1) << p.log_slots < slots) ++p.log_slots;
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

// The same with PagedAttention<T>.
template <typename Launch>
void dispatch_paged(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& page_table, const Tensor& k,
                    const Tensor& v, const Tensor& q_seqlens, const Tensor& kv_seqlens, bool causal, int64_t window,
                    double softcap, double scale, Launch launch) {
  dispatch<Half, BFloat16>(q.scalar_type(), "prefill_attention: q", [&]<typename T>() {
    const PagedAttention<T> p =
        make_paged_attention<T>(out, lse, q, page_table, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale);
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

#define MINFER_PAGED_PREFILL_ATTENTION(NAME, LAUNCH)                                                                       \
  static void NAME(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor q, const minfer::Tensor page_table,       \
                   const minfer::Tensor k, const minfer::Tensor v, const minfer::Tensor q_seqlens,                        \
                   const minfer::Tensor kv_seqlens, bool causal, int64_t window, double softcap, double scale) {          \
    minfer::dispatch_paged(out, lse, q, page_table, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale,          \
                           [](const auto& p) { LAUNCH(p); });                                                             \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor page_table, Tensor k, Tensor v, Tensor q_seqlens, "  \
                  "Tensor kv_seqlens, bool causal=True, int window=0, float softcap=0.0, float scale=0.0) -> ()")
