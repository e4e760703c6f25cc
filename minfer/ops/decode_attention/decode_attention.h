// What every CUDA and C++ decode_attention kernel is given, and how it becomes a torch op. `__init__.py` says what is computed.
//
// A kernel file defines `template <typename T, typename KV> void launch(const Decode<T, KV>&)` and ends with
// `MINFER_DECODE_ATTENTION(decode_attention_<file name>, minfer::launch)`. T is Half or BFloat16; KV is T or Float8E4M3.
#pragma once

#include <cmath>

#include "ops/cached.h"

namespace minfer {

// The length of the rows of v and out beside that of q and k: 128 beside 192, as in DeepSeek's models, and else the same.
MINFER_EITHER constexpr int v_dim_of(int dim) { return dim == 192 ? 128 : dim; }

template <typename T, typename KV_>
struct Decode : Cached {
  using Element = T;
  using KV = KV_;
  Rows<T> out;
  Rows<const T> q;
  Rows<const KV> k, v;
  const float* scales;  // of k and v; null: 1
  int dim;
  float scale;

  MINFER_EITHER int v_dim() const { return v_dim_of(dim); }
  MINFER_EITHER float scale_of_k() const { return scales ? scales[0] : 1.0f; }
  MINFER_EITHER float scale_of_v() const { return scales ? scales[1] : 1.0f; }
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T, typename KV>
void require_vectors(const Decode<T, KV>& p) {
  check_rows_in_pieces(p.out, p.v_dim(), "decode_attention: out"), check_rows_in_pieces(p.q, p.dim, "decode_attention: q");
  check_rows_in_pieces(p.k, p.dim, "decode_attention: k_cache");
  check_rows_in_pieces(p.v, p.v_dim(), "decode_attention: v_cache");
}

// Calls launch.operator()<kDim>() for a head_dim that is a power of two. Throws for others.
template <typename Launch>
void for_power_of_two(int dim, Launch launch) {
  STD_TORCH_CHECK(dim == 64 || dim == 128 || dim == 256, "decode_attention: this kernel takes heads of 64, 128 or 256, got ",
                  dim);
  if (dim == 64) launch.template operator()<64>();
  else if (dim == 128) launch.template operator()<128>();
  else launch.template operator()<256>();
}

// Calls launch.operator()<kDim>() for the head_dim.
template <typename Launch>
void for_dim(int dim, Launch launch) {
  if (dim == 96) launch.template operator()<96>();
  else if (dim == 192) launch.template operator()<192>();
  else for_power_of_two(dim, launch);
}

// What the tensors may be: up to so many new tokens of a sequence; pages of 16, 64 or 256 slots, or of any power of two.
struct Limits {
  int new_tokens = 8;
  bool any_page = false;
};

template <typename T, typename KV>
Decode<T, KV> make_decode(const Tensor& out, const Tensor& q, const Tensor& lengths, const Tensor& page_table,
                          const Tensor& k, const Tensor& v, const Tensor& scales, double scale, const Limits& limits) {
  Decode<T, KV> p;
  p.q = make_rows(q, input<T>(q, "decode_attention: q"), "decode_attention: q");
  p.k = make_rows(k, input<KV>(k, "decode_attention: k_cache"), "decode_attention: k_cache");
  p.v = make_rows(v, input<KV>(v, "decode_attention: v_cache"), "decode_attention: v_cache");
  p.out = make_rows(out, output<T>(out, "decode_attention: out"), "decode_attention: out");
  const int64_t batch = q.size(0), fresh = q.size(1), heads = q.size(2), dim = q.size(3), kv_heads = k.size(2);
  const int64_t v_dim = v_dim_of(to_int(dim, "decode_attention: q"));
  check_sizes(out, "decode_attention: out", {batch, fresh, heads, v_dim});
  check_sizes(lengths, "decode_attention: lengths", {batch});
  check_rank(page_table, "decode_attention: page_table", 2);
  const int64_t pages = page_table.size(1), slots = k.size(1);
  const bool paged = pages > 0;
  check_sizes(page_table, "decode_attention: page_table", {batch, pages});
  check_sizes(k, "decode_attention: k_cache", {paged ? k.size(0) : batch, slots, kv_heads, dim});
  check_sizes(v, "decode_attention: v_cache", {k.size(0), slots, kv_heads, v_dim});
  check_sizes(scales, "decode_attention: scales", {std::is_same_v<KV, T> ? 0 : 2});
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "decode_attention: q must have a multiple of the ", kv_heads,
                  " heads of k_cache, got ", heads);
  STD_TORCH_CHECK(dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256,
                  "decode_attention: q must have a head_dim of 64, 96, 128, 192 or 256, got ", dim);
  STD_TORCH_CHECK(fresh >= 1 && fresh <= limits.new_tokens, "decode_attention: q must have 1 to ", limits.new_tokens,
                  " new tokens a sequence, got ", fresh);
  STD_TORCH_CHECK(!paged || (slots > 0 && (slots & (slots - 1)) == 0),
                  "decode_attention: the slots of a page of k_cache must be a power of two, got ", slots);
  STD_TORCH_CHECK(!paged || limits.any_page || slots == 16 || slots == 64 || slots == 256,
                  "decode_attention: k_cache must have pages of 16, 64 or 256 slots, got ", slots);
  STD_TORCH_CHECK(scale >= 0, "decode_attention: scale must not be negative, got ", scale);
  check_contiguous(lengths, "decode_attention: lengths"), check_rows(page_table, "decode_attention: page_table");

  p.lengths = input<int32_t>(lengths, "decode_attention: lengths");
  p.page_table = paged ? input<int32_t>(page_table, "decode_attention: page_table") : nullptr;
  p.table_stride = batch > 1 ? page_table.stride(0) : 0;
  p.scales = scales.numel() ? input<float>(scales, "decode_attention: scales") : nullptr;
  p.batch = to_int(batch, "decode_attention: q"), p.new_tokens = static_cast<int>(fresh);
  p.heads = to_int(heads, "decode_attention: q"), p.kv_heads = static_cast<int>(kv_heads), p.dim = static_cast<int>(dim);
  p.blocks = to_int(k.size(0), "decode_attention: k_cache"), p.slots = to_int(slots, "decode_attention: k_cache");
  p.most = to_int(paged ? pages * slots : slots, "decode_attention: page_table");
  STD_TORCH_CHECK(p.most <= INT_MAX / 4, "decode_attention: page_table must name fewer than 2^29 slots a sequence");
  p.scale = static_cast<float>(scale > 0 ? scale : 1 / std::sqrt(double(dim)));
#ifdef __CUDACC__
  p.stream = stream_of(q);
#endif
  return p;
}

// Calls launch(Decode<T, KV>) with the types of the tensors. An empty out launches nothing.
template <typename Launch>
void dispatch(const Tensor& out, const Tensor& q, const Tensor& lengths, const Tensor& page_table, const Tensor& k,
              const Tensor& v, const Tensor& scales, double scale, Launch launch, const Limits& limits = {}) {
  dispatch<Half, BFloat16>(q.scalar_type(), "decode_attention: q", [&]<typename T>() {
    dispatch<T, Float8E4M3>(k.scalar_type(), "decode_attention: k_cache", [&]<typename KV>() {
      const Decode<T, KV> p = make_decode<T, KV>(out, q, lengths, page_table, k, v, scales, scale, limits);
      if (out.numel() > 0) launch(p);
    });
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_DECODE_ATTENTION(NAME, LAUNCH)                                                                             \
  static void NAME(minfer::Tensor out, const minfer::Tensor q, const minfer::Tensor lengths,                             \
                   const minfer::Tensor page_table, const minfer::Tensor k_cache, const minfer::Tensor v_cache,          \
                   const minfer::Tensor scales, double scale) {                                                          \
    minfer::dispatch(out, q, lengths, page_table, k_cache, v_cache, scales, scale, [](const auto& p) { LAUNCH(p); });    \
  }                                                                                                                      \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor q, Tensor lengths, Tensor page_table, Tensor k_cache, Tensor v_cache, "       \
                  "Tensor scales, float scale=0.0) -> ()")
