// What every CUDA and C++ merge_state kernel is given, and how it becomes a torch op. `__init__.py` says what is computed.
//
// A kernel file defines `template <typename T> void launch(const States<T>&)` and ends with
// `MINFER_MERGE_STATE(merge_state_<file name>, minfer::launch)`. T is float, Half or BFloat16.
#pragma once

#include <cmath>

#include "ops/rows.h"

namespace minfer {

// How much of a result is of each state: 0 of both where neither has seen a key.
struct Weights {
  float of_a, of_b;

  MINFER_EITHER Weights(float a_lse, float b_lse) {
#ifdef __CUDA_ARCH__
    const float ratio = __expf(-fabsf(a_lse - b_lse)), larger = __fdividef(1.0f, 1.0f + ratio);
#else
    const float ratio = std::exp(-std::fabs(a_lse - b_lse)), larger = 1.0f / (1.0f + ratio);
#endif
    of_a = a_lse >= b_lse ? larger : ratio * larger, of_b = a_lse >= b_lse ? ratio * larger : larger;
    if (a_lse == -INFINITY && b_lse == -INFINITY) of_a = of_b = 0.0f;
  }

  // A value whose weight is 0 may be NaN.
  MINFER_EITHER float merge(float a, float b) const {
    return (of_a == 0.0f ? 0.0f : of_a * a) + (of_b == 0.0f ? 0.0f : of_b * b);
  }
};

// log(exp(a) + exp(b)).
MINFER_EITHER inline float log_add_exp(float a, float b) {
  const float larger = a >= b ? a : b;
#ifdef __CUDA_ARCH__
  return larger == -INFINITY ? larger : larger + log1pf(__expf(-fabsf(a - b)));
#else
  return larger == -INFINITY ? larger : larger + std::log1p(std::exp(-std::fabs(a - b)));
#endif
}

// (batch, heads, seq), whose tokens are contiguous. Strides in elements.
template <typename T>
struct LogSums {
  T* begin;
  int64_t of_batch, of_head;

  MINFER_EITHER T& at(int64_t number, int head, int token) const {
    return begin[number * of_batch + head * of_head + token];
  }
};

template <typename T>
struct States {
  Rows<T> out;  // (batch, seq, heads, dim)
  Rows<const T> a, b;
  LogSums<float> lse;
  LogSums<const float> a_lse, b_lse;
  int batch, seq, heads, dim;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

template <typename Element>
LogSums<Element> make_log_sums(const Tensor& tensor, Element* begin, const char* who) {
  check_rows(tensor, who);
  return {begin, stride_or_0(tensor, 0), stride_or_0(tensor, 1)};
}

template <typename T>
States<T> make_states(const Tensor& out, const Tensor& lse, const Tensor& a, const Tensor& a_lse, const Tensor& b,
                      const Tensor& b_lse) {
  check_rank(a, "merge_state: a", 4);
  const int64_t batch = a.size(0), seq = a.size(1), heads = a.size(2), dim = a.size(3);
  check_sizes(out, "merge_state: out", {batch, seq, heads, dim});
  check_sizes(b, "merge_state: b", {batch, seq, heads, dim});
  check_sizes(lse, "merge_state: lse", {batch, heads, seq});
  check_sizes(a_lse, "merge_state: a_lse", {batch, heads, seq});
  check_sizes(b_lse, "merge_state: b_lse", {batch, heads, seq});
  States<T> p;
  p.out = make_rows(out, output<T>(out, "merge_state: out"), "merge_state: out");
  p.a = make_rows(a, input<T>(a, "merge_state: a"), "merge_state: a");
  p.b = make_rows(b, input<T>(b, "merge_state: b"), "merge_state: b");
  p.lse = make_log_sums(lse, output<float>(lse, "merge_state: lse"), "merge_state: lse");
  p.a_lse = make_log_sums(a_lse, input<float>(a_lse, "merge_state: a_lse"), "merge_state: a_lse");
  p.b_lse = make_log_sums(b_lse, input<float>(b_lse, "merge_state: b_lse"), "merge_state: b_lse");
  p.batch = to_int(batch, "merge_state: a"), p.seq = to_int(seq, "merge_state: a");
  p.heads = to_int(heads, "merge_state: a"), p.dim = to_int(dim, "merge_state: a");
#ifdef __CUDACC__
  p.stream = stream_of(a);
#endif
  return p;
}

// Calls launch(States<T>) with the T of the tensors; an empty out is no work.
template <typename Launch>
void dispatch(const Tensor& out, const Tensor& lse, const Tensor& a, const Tensor& a_lse, const Tensor& b,
              const Tensor& b_lse, Launch launch) {
  if (out.numel() == 0) return;
  dispatch<float, Half, BFloat16>(a.scalar_type(), "merge_state: a",
                                  [&]<typename T>() { launch(make_states<T>(out, lse, a, a_lse, b, b_lse)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_MERGE_STATE(NAME, LAUNCH)                                                                                 \
  static void NAME(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor a, const minfer::Tensor a_lse,          \
                   const minfer::Tensor b, const minfer::Tensor b_lse) {                                                \
    minfer::dispatch(out, lse, a, a_lse, b, b_lse, [](const auto& p) { LAUNCH(p); });                                   \
  }                                                                                                                     \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor(b!) lse, Tensor a, Tensor a_lse, Tensor b, Tensor b_lse) -> ()")
