// What every CUDA and C++ kv_append kernel is given, and how it becomes torch ops.
//
// A row of k and v, kv_heads x head_dim elements of one new token, is written to a place of the two caches. A place is a
// number below `places`, page * page_size + slot for a paged cache and sequence * longest + position for a contiguous one.
// What has a place outside of the cache, such as -1 for padding, is not written, and its row is not read.
//
// A cache has the elements of k and v, or is quantised: value / scale, saturated to 448, rounded to fp8 e4m3.
//
// A kernel file defines `template <typename T, typename Cache> void launch(const Append<T, Cache>&)` and ends with
// `MINFER_KV_APPEND(kv_append_<file name>, launch)`. T is float or a half type, Cache is T or Float8E4M3.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of k and v are contiguous and their strides, in elements, may exceed `width`; the caches are dense.
template <typename T, typename Cache>
struct Append {
  Cache* cache[2];  // of k and of v
  const T* rows[2];
  int64_t stride[2];
  // One entry for each token: its place; or one for each sequence of `fresh` new tokens: the first one's position.
  const int64_t* where;
  const float* scales;  // of k and of v, where the cache is quantised
  int tokens, width, fresh;
  int64_t longest;  // 0 where `where` has places
  int64_t places;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  // -1 where a token is not to be written.
  MINFER_EITHER int64_t place(int token) const {
    if (longest == 0) {
      const int64_t place = where[token];
      return place >= 0 && place < places ? place : -1;
    }
    const int64_t sequence = token / fresh, first = where[sequence], position = first + (token - sequence * fresh);
    return first >= 0 && position < longest && position >= first ? sequence * longest + position : -1;
  }
};

// Throws unless rows can be read 16 bytes at a time, and a cache be written in as many pieces.
template <typename T, typename Cache>
void require_vectors(const Append<T, Cache>& p) {
  constexpr int64_t piece = 16 / sizeof(T) * sizeof(Cache);
  check_pieces(p.rows[0], p.width, p.stride[0], "kv_append: k");
  check_pieces(p.rows[1], p.width, p.stride[1], "kv_append: v");
  check_pieces(p.cache[0], p.width, p.width, "kv_append: k_cache", piece);
  check_pieces(p.cache[1], p.width, p.width, "kv_append: v_cache", piece);
}

// How far apart rows of k or v lie: (tokens, width), or (sequences, fresh, width) with all rows equally far apart.
inline int64_t row_stride(const Tensor& rows, const char* who) {
  check_rows(rows, who);
  if (rows.dim() == 2) return rows.size(0) > 1 ? rows.stride(0) : rows.size(1);
  const int64_t sequences = rows.size(0), fresh = rows.size(1);
  if (fresh == 1) return sequences > 1 ? rows.stride(0) : rows.size(2);
  STD_TORCH_CHECK(sequences == 1 || rows.stride(0) == fresh * rows.stride(1), who,
                  " must have the tokens of all sequences equally far apart; copy it to a contiguous tensor");
  return rows.stride(1);
}

template <typename T, typename Cache>
Append<T, Cache> make_append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                             const Tensor& where, const Tensor* scales) {
  check_rank(k_cache, "kv_append: k_cache", 4);
  const bool paged = k.dim() == 2;
  const int64_t blocks = k_cache.size(0), longest = k_cache.size(1), heads = k_cache.size(2), dim = k_cache.size(3);
  const int64_t width = heads * dim, fresh = paged ? 1 : k.size(1), tokens = k.size(0) * fresh;
  check_sizes(v_cache, "kv_append: v_cache", {blocks, longest, heads, dim});
  if (paged) {
    check_sizes(k, "kv_append: k", {tokens, width}), check_sizes(v, "kv_append: v", {tokens, width});
  } else {
    check_sizes(k, "kv_append: k", {blocks, fresh, width}), check_sizes(v, "kv_append: v", {blocks, fresh, width});
  }
  check_sizes(where, "kv_append: where", {k.size(0)});
  check_contiguous(k_cache, "kv_append: k_cache"), check_contiguous(v_cache, "kv_append: v_cache");
  check_contiguous(where, "kv_append: where");
  if (scales) check_sizes(*scales, "kv_append: scales", {2}), check_contiguous(*scales, "kv_append: scales");

  Append<T, Cache> p;
  p.cache[0] = output<Cache>(k_cache, "kv_append: k_cache"), p.cache[1] = output<Cache>(v_cache, "kv_append: v_cache");
  p.rows[0] = input<T>(k, "kv_append: k"), p.rows[1] = input<T>(v, "kv_append: v");
  p.stride[0] = row_stride(k, "kv_append: k"), p.stride[1] = row_stride(v, "kv_append: v");
  p.where = input<int64_t>(where, "kv_append: where");
  p.scales = scales ? input<float>(*scales, "kv_append: scales") : nullptr;
  p.tokens = to_int(tokens, "kv_append: k"), p.width = to_int(width, "kv_append: k");
  p.longest = paged ? 0 : longest, p.places = blocks * longest, p.fresh = to_int(fresh, "kv_append: k");
#ifdef __CUDACC__
  p.stream = stream_of(k);
#endif
  return p;
}

// Calls launch(Append<T, Cache>) with the types of the tensors; no new token, or a cache without a place, is no work.
template <bool kQuantised, typename Launch>
void dispatch(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& where,
              const Tensor* scales, Launch launch) {
  STD_TORCH_CHECK(k.dim() == 2 || k.dim() == 3, "kv_append: k must be (tokens, width) for a paged cache or (sequences, new ",
                  "tokens, width) for a contiguous one, got ", k.dim(), " dimensions");
  if (k.numel() == 0 || k_cache.numel() == 0) return;
  dispatch<float, Half, BFloat16>(k.scalar_type(), "kv_append: k", [&]<typename T>() {
    using Cache = std::conditional_t<kQuantised, Float8E4M3, T>;
    launch(make_append<T, Cache>(k_cache, v_cache, k, v, where, scales));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_KV_APPEND(NAME, LAUNCH)                                                                             \
  static void NAME(minfer::Tensor k_cache, minfer::Tensor v_cache, const minfer::Tensor k, const minfer::Tensor v, \
                   const minfer::Tensor where) {                                                                   \
    minfer::dispatch<false>(k_cache, v_cache, k, v, where, nullptr, [](const auto& p) { LAUNCH(p); });             \
  }                                                                                                                \
  static void NAME##_fp8(minfer::Tensor k_cache, minfer::Tensor v_cache, const minfer::Tensor k,                   \
                         const minfer::Tensor v, const minfer::Tensor where, const minfer::Tensor scales) {        \
    minfer::dispatch<true>(k_cache, v_cache, k, v, where, &scales, [](const auto& p) { LAUNCH(p); });              \
  }                                                                                                                \
  MINFER_OP(NAME, "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor where) -> ()")              \
  MINFER_OP(NAME##_fp8, "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor where, Tensor scales) -> ()")
