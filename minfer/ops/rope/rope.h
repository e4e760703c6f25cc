// What every CUDA and C++ rope kernel is given, and how it becomes a torch op.
//
// The first rotary_dim elements of each head are rotated in pairs (a, b): (a cos - b sin, b cos + a sin), by the row of the
// tables that the token's position names; backward with the negative angle. A pair is (x[i], x[i + rotary_dim / 2]), or with
// interleaved (x[2i], x[2i + 1]). Arithmetic is fp32, and results are rounded once. A position without a row gives NaN.
//
// A kernel file defines a struct `Launch` with `template <bool kBackward, bool kInterleaved, typename T> static void
// run(const Rope<T>&)` and ends with `MINFER_ROPE(rope_<file name>, Launch)`. T is float or a half type.
#pragma once

#include <cmath>

#include "ops/op.h"

namespace minfer {

// Heads of q or of k: (batch, seq, heads, head_dim) with contiguous elements; strides in elements.
template <typename T>
struct Heads {
  T* begin;
  int64_t of_batch;
  int of_token, of_head;  // 32 bits: a product takes one instruction instead of four

  MINFER_EITHER T* at(int batch, int token, int head) const {
    return begin + batch * of_batch + int64_t(token) * of_token + int64_t(head) * of_head;
  }
};

template <typename T>
struct Rope {
  Heads<T> out[2];  // of q and of k
  Heads<const T> in[2];  // the same memory where they are changed in place
  const int* positions;  // (batch, seq), null: a token has the position that it has in its sequence
  const float *cos, *sin;  // (positions, half)
  int64_t cos_stride, sin_stride;
  int rows;  // of the tables
  int batch, seq, heads[2], dim, half;  // half: of rotary_dim
  bool in_place;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  MINFER_EITHER int all_heads() const { return heads[0] + heads[1]; }

  MINFER_EITHER int position(int of_batch, int token) const {
    return positions ? positions[int64_t(of_batch) * seq + token] : token;
  }
  MINFER_EITHER bool has_row(int position) const { return position >= 0 && position < rows; }

  // Calls f(first element to read, first to write) with one of a token's heads, those of k after those of q.
  template <typename F>
  MINFER_EITHER void with_head(int of_batch, int token, int head, F f) const {
    const int of = head >= heads[0], number = of ? head - heads[0] : head;
    f(in[of].at(of_batch, token, number), out[of].at(of_batch, token, number));
  }
};

// The pair (a, b) rotated; sin has the sign of the direction.
MINFER_EITHER inline void rotate_pair(float& a, float& b, float cos, float sin) {
  const float before = a;
  a = before * cos - b * sin;
  b = b * cos + before * sin;
}

// Throws unless both halves of what is rotated, and what is not, can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const Rope<T>& p) {
  constexpr int64_t piece = 16 / sizeof(T);
  const char* const names[] = {"rope: q", "rope: k"};
  for (int of = 0; of < 2; ++of) {
    if (p.heads[of] == 0) continue;
    const auto check = [&](const T* begin, int64_t batch, int64_t token, int64_t head) {
      check_pieces(begin, p.dim, head, names[of]);
      check_pieces(begin, p.dim, batch, names[of]);
      check_pieces(begin, p.dim, token, names[of]);
    };
    check(p.in[of].begin, p.in[of].of_batch, p.in[of].of_token, p.in[of].of_head);
    check(p.out[of].begin, p.out[of].of_batch, p.out[of].of_token, p.out[of].of_head);
  }
  STD_TORCH_CHECK(p.half % 8 == 0 && p.half % piece == 0, "rope: cos must have a multiple of 8 elements in a row, got ",
                  p.half);
  check_pieces(p.cos, p.half, p.cos_stride, "rope: cos");
  check_pieces(p.sin, p.half, p.sin_stride, "rope: sin");
}

// Strides of dimensions of one element mean nothing, and are 0 here. Throws for tokens or heads 2^31 elements apart.
template <typename T, typename Element>
Heads<Element> make_heads(const Tensor& tensor, Element* begin) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; };
  return {begin, stride(0), to_int(stride(1), "rope: q and k"), to_int(stride(2), "rope: q and k")};
}

template <typename T>
Rope<T> make_rope(const Tensor& q_out, const Tensor& k_out, const Tensor& q, const Tensor& k, const Tensor& positions,
                  const Tensor& cos, const Tensor& sin) {
  check_rank(q_out, "rope: q_out", 4), check_rank(k_out, "rope: k_out", 4);
  check_rank(q, "rope: q", 4), check_rank(cos, "rope: cos", 2), check_rank(positions, "rope: positions", 2);
  const int64_t batch = q_out.size(0), seq = q_out.size(1), dim = q_out.size(3), half = cos.size(1);
  const int64_t q_heads = q_out.size(2), k_heads = k_out.size(2);
  Rope<T> p;
  p.in_place = q.size(1) == 0;
  check_sizes(k_out, "rope: k_out", {batch, seq, k_heads, dim});
  check_sizes(q, "rope: q", {batch, p.in_place ? 0 : seq, q_heads, dim});
  check_sizes(k, "rope: k", {batch, p.in_place ? 0 : seq, k_heads, dim});
  check_sizes(positions, "rope: positions", {batch, positions.size(1) == 0 ? 0 : seq});
  check_sizes(sin, "rope: sin", {cos.size(0), half});
  STD_TORCH_CHECK(half >= 1 && 2 * half <= dim, "rope: cos must have 1 to ", dim / 2, " elements in a row, got ", half);
  STD_TORCH_CHECK(positions.size(1) > 0 || cos.size(0) >= seq, "rope: cos must have a row for each of ", seq,
                  " tokens, got ", cos.size(0));
  check_rows(q_out, "rope: q_out"), check_rows(k_out, "rope: k_out"), check_rows(q, "rope: q"), check_rows(k, "rope: k");
  check_rows(cos, "rope: cos"), check_rows(sin, "rope: sin"), check_contiguous(positions, "rope: positions");

  p.out[0] = make_heads<T>(q_out, output<T>(q_out, "rope: q_out"));
  p.out[1] = make_heads<T>(k_out, output<T>(k_out, "rope: k_out"));
  p.in[0] = make_heads<T>(p.in_place ? q_out : q, p.in_place ? p.out[0].begin : input<T>(q, "rope: q"));
  p.in[1] = make_heads<T>(p.in_place ? k_out : k, p.in_place ? p.out[1].begin : input<T>(k, "rope: k"));
  p.positions = positions.size(1) ? input<int32_t>(positions, "rope: positions") : nullptr;
  p.cos = input<float>(cos, "rope: cos"), p.sin = input<float>(sin, "rope: sin");
  p.cos_stride = cos.size(0) > 1 ? cos.stride(0) : half, p.sin_stride = sin.size(0) > 1 ? sin.stride(0) : half;
  p.rows = to_int(cos.size(0), "rope: cos"), p.half = static_cast<int>(half);
  p.batch = to_int(batch, "rope: q_out"), p.seq = to_int(seq, "rope: q_out"), p.dim = to_int(dim, "rope: q_out");
  p.heads[0] = to_int(q_heads, "rope: q_out"), p.heads[1] = to_int(k_heads, "rope: k_out");
  to_int(q_heads + k_heads, "rope: q_out and k_out together");
#ifdef __CUDACC__
  p.stream = stream_of(q_out);
#endif
  return p;
}

// Calls Launch::run<backward, interleaved>(Rope<T>) with the T of the tensors; empty outputs are no work.
template <typename Launch>
void dispatch(const Tensor& q_out, const Tensor& k_out, const Tensor& q, const Tensor& k, const Tensor& positions,
              const Tensor& cos, const Tensor& sin, bool backward, bool interleaved) {
  if (q_out.numel() == 0 && k_out.numel() == 0) return;
  dispatch<float, Half, BFloat16>(q_out.scalar_type(), "rope: q_out", [&]<typename T>() {
    const Rope<T> p = make_rope<T>(q_out, k_out, q, k, positions, cos, sin);
    if (interleaved) backward ? Launch::template run<true, true>(p) : Launch::template run<false, true>(p);
    else backward ? Launch::template run<true, false>(p) : Launch::template run<false, false>(p);
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_ROPE(NAME, LAUNCH)                                                                                      \
  static void NAME(minfer::Tensor q_out, minfer::Tensor k_out, const minfer::Tensor q, const minfer::Tensor k,         \
                   const minfer::Tensor positions, const minfer::Tensor cos, const minfer::Tensor sin, bool backward,  \
                   bool interleaved) {                                                                                 \
    minfer::dispatch<LAUNCH>(q_out, k_out, q, k, positions, cos, sin, backward, interleaved);                          \
  }                                                                                                                    \
  MINFER_OP(NAME, "(Tensor(a!) q_out, Tensor(b!) k_out, Tensor q, Tensor k, Tensor positions, Tensor cos, Tensor sin, " \
                  "bool backward=False, bool interleaved=False) -> ()")
