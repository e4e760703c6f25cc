// What every CUDA and C++ rope_append kernel is given, and how it becomes a torch op.
//
// The heads of q and of k are rotated, after a norm of each head where there are weights, and written: q to a tensor of its own,
// k to a place of its cache, and v as it is to the same place of the other. The first rotary_dim elements of a head are rotated
// in pairs (x[i], x[i + rotary_dim / 2]) by the row of the tables that the token's position names. Arithmetic is fp32, and
// results are rounded once. A position without a row gives NaN; a token without a place in the cache is not written to it.
//
// A kernel file defines `template <typename T> void launch(const RopeAppend<T>&)` and ends with
// `MINFER_ROPE_APPEND(rope_append_<file name>, launch)`. T is float or a half type.
#pragma once

#include <cmath>

#include "ops/op.h"

namespace minfer {

enum class Part { q, k, v };

template <typename T>
struct RopeAppend {
  T* q;  // (tokens, heads, dim)
  T* cache[2];  // of k and of v: (places, kv_heads, dim)
  const T* qkv;
  int64_t token_stride, head_stride;  // of qkv
  const int* positions;
  const int64_t* where;
  const float *cos, *sin;  // (rows, half)
  int64_t cos_stride, sin_stride;
  const T* weights[2];  // of q and of k; null without a norm
  int64_t places;
  int tokens, heads, kv_heads, dim, half, rows;
  float share, eps;  // 1 / dim
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  MINFER_EITHER int all_heads() const { return heads + 2 * kv_heads; }
  MINFER_EITHER Part part(int head) const { return head < heads ? Part::q : head < heads + kv_heads ? Part::k : Part::v; }
  MINFER_EITHER bool has_row(int position) const { return position >= 0 && position < rows; }
  MINFER_EITHER bool has_norm() const { return weights[0] != nullptr; }

  MINFER_EITHER const T* from(int token, int head) const { return qkv + token * token_stride + head * head_stride; }

  // Where a head is written; null where that is nowhere.
  MINFER_EITHER T* to(int token, int head, int64_t place) const {
    if (head < heads) return q + (int64_t(token) * heads + head) * dim;
    if (place < 0 || place >= places) return nullptr;
    const bool of_v = head >= heads + kv_heads;
    return cache[of_v] + (place * kv_heads + head - heads - of_v * kv_heads) * dim;
  }
};

// Throws unless both halves of what is rotated, and what is not, can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const RopeAppend<T>& p) {
  check_pieces(p.qkv, p.dim, p.token_stride, "rope_append: qkv");
  check_pieces(p.qkv, p.dim, p.head_stride, "rope_append: qkv");
  check_pieces(p.q, p.dim, p.dim, "rope_append: q");
  check_pieces(p.cache[0], p.dim, p.dim, "rope_append: k_cache");
  check_pieces(p.cache[1], p.dim, p.dim, "rope_append: v_cache");
  check_pieces(p.cos, p.half, p.cos_stride, "rope_append: cos");
  check_pieces(p.sin, p.half, p.sin_stride, "rope_append: sin");
  STD_TORCH_CHECK(p.half % 8 == 0, "rope_append: cos must have a multiple of 8 elements in a row, got ", p.half);
  if (!p.has_norm()) return;
  check_pieces(p.weights[0], p.dim, p.dim, "rope_append: q_weight");
  check_pieces(p.weights[1], p.dim, p.dim, "rope_append: k_weight");
}

template <typename T>
RopeAppend<T> make_rope_append(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& qkv,
                               const Tensor& positions, const Tensor& where, const Tensor& cos, const Tensor& sin,
                               const Tensor& q_weight, const Tensor& k_weight, double eps) {
  check_rank(q, "rope_append: q", 3), check_rank(k_cache, "rope_append: k_cache", 4), check_rank(cos, "rope_append: cos", 2);
  const int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k_cache.size(2), half = cos.size(1);
  const int64_t of_norm = q_weight.numel() ? dim : 0;
  check_sizes(k_cache, "rope_append: k_cache", {k_cache.size(0), k_cache.size(1), kv_heads, dim});
  check_sizes(v_cache, "rope_append: v_cache", {k_cache.size(0), k_cache.size(1), kv_heads, dim});
  check_sizes(qkv, "rope_append: qkv", {tokens, heads + 2 * kv_heads, dim});
  check_sizes(positions, "rope_append: positions", {tokens}), check_sizes(where, "rope_append: where", {tokens});
  check_sizes(sin, "rope_append: sin", {cos.size(0), half});
  check_sizes(q_weight, "rope_append: q_weight", {of_norm}), check_sizes(k_weight, "rope_append: k_weight", {of_norm});
  STD_TORCH_CHECK(half >= 1 && 2 * half <= dim, "rope_append: cos must have 1 to ", dim / 2, " elements in a row, got ", half);
  check_contiguous(q, "rope_append: q"), check_contiguous(k_cache, "rope_append: k_cache");
  check_contiguous(v_cache, "rope_append: v_cache"), check_contiguous(positions, "rope_append: positions");
  check_contiguous(where, "rope_append: where"), check_rows(qkv, "rope_append: qkv"), check_rows(cos, "rope_append: cos");
  check_rows(sin, "rope_append: sin"), check_rows(q_weight, "rope_append: q_weight");
  check_rows(k_weight, "rope_append: k_weight");

  RopeAppend<T> p;
  p.q = output<T>(q, "rope_append: q");
  p.cache[0] = output<T>(k_cache, "rope_append: k_cache"), p.cache[1] = output<T>(v_cache, "rope_append: v_cache");
  p.qkv = input<T>(qkv, "rope_append: qkv");
  p.head_stride = heads + 2 * kv_heads > 1 ? qkv.stride(1) : dim;
  p.token_stride = tokens > 1 ? qkv.stride(0) : 0;
  p.positions = input<int32_t>(positions, "rope_append: positions");
  p.where = input<int64_t>(where, "rope_append: where");
  p.cos = input<float>(cos, "rope_append: cos"), p.sin = input<float>(sin, "rope_append: sin");
  p.cos_stride = cos.size(0) > 1 ? cos.stride(0) : half, p.sin_stride = sin.size(0) > 1 ? sin.stride(0) : half;
  p.weights[0] = of_norm ? input<T>(q_weight, "rope_append: q_weight") : nullptr;
  p.weights[1] = of_norm ? input<T>(k_weight, "rope_append: k_weight") : nullptr;
  p.places = k_cache.size(0) * k_cache.size(1);
  p.tokens = to_int(tokens, "rope_append: q"), p.heads = to_int(heads, "rope_append: q");
  p.kv_heads = to_int(kv_heads, "rope_append: k_cache"), p.dim = to_int(dim, "rope_append: q");
  p.rows = to_int(cos.size(0), "rope_append: cos"), p.half = static_cast<int>(half);
  to_int(tokens * (heads + 2 * kv_heads), "rope_append: qkv");
  p.share = 1.0f / static_cast<float>(dim), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(q);
#endif
  return p;
}

// Calls launch(RopeAppend<T>) with the T of the tensors; no token is no work.
template <typename Launch>
void dispatch(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& qkv, const Tensor& positions,
              const Tensor& where, const Tensor& cos, const Tensor& sin, const Tensor& q_weight, const Tensor& k_weight,
              double eps, Launch launch) {
  if (qkv.numel() == 0) return;
  dispatch<float, Half, BFloat16>(qkv.scalar_type(), "rope_append: qkv", [&]<typename T>() {
    launch(make_rope_append<T>(q, k_cache, v_cache, qkv, positions, where, cos, sin, q_weight, k_weight, eps));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_ROPE_APPEND(NAME, LAUNCH)                                                                                  \
  static void NAME(minfer::Tensor q, minfer::Tensor k_cache, minfer::Tensor v_cache, const minfer::Tensor qkv,            \
                   const minfer::Tensor positions, const minfer::Tensor where, const minfer::Tensor cos,                  \
                   const minfer::Tensor sin, const minfer::Tensor q_weight, const minfer::Tensor k_weight, double eps) {  \
    minfer::dispatch(q, k_cache, v_cache, qkv, positions, where, cos, sin, q_weight, k_weight, eps,                       \
                     [](const auto& p) { LAUNCH(p); });                                                                   \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) q, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor qkv, Tensor positions, Tensor where, "   \
                  "Tensor cos, Tensor sin, Tensor q_weight, Tensor k_weight, float eps=1e-6) -> ()")
