// What every CUDA and C++ seq_sum kernel is given, and how it becomes a torch op. `__init__.py` says what is computed.
//
// A kernel file defines `template <typename T> void launch(const SeqSum<T>&)` and ends with
// `MINFER_SEQ_SUM(seq_sum_<file name>, minfer::launch)`. T is float or BFloat16.
#pragma once

#include "ops/op.h"

namespace minfer {

// One sequence in memory: `length` elements count, and `room` are to be written, the rest of them with 0.
template <typename T>
struct Sequence {
  T* y;
  const T* x;
  int length, room;
};

template <typename T>
struct SeqSum {
  T* y;
  const T* x;
  const int* seqlens;  // null: every sequence has `longest` elements
  bool packed;
  int batch;
  int longest;  // that a sequence may be; all tokens where sequences are packed
  int64_t y_stride, x_stride;  // of padded sequences, in elements
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  // How many sequences a kernel goes through. What lies behind the last packed one counts as one more, of length 0.
  MINFER_EITHER int count() const { return packed ? batch + 1 : batch; }

  // Lengths that do not fit the tensors are clamped.
  MINFER_EITHER Sequence<T> sequence(int number) const {
    const auto limit = [](int value, int low, int high) { return value < low ? low : value > high ? high : value; };
    int64_t from_y = number * y_stride, from_x = number * x_stride;
    int length = longest, room = longest;
    if (packed) {
      const int first = number ? limit(seqlens[number], 0, longest) : 0;
      const bool behind = number == batch;
      const int end = behind ? longest : limit(seqlens[number + 1], first, longest);
      from_y = from_x = first, room = end - first, length = behind ? 0 : room;
    } else if (seqlens) {
      length = limit(seqlens[number], 0, longest);
    }
    return {y + from_y, x + from_x, length, room};  // one sum: with two, the compiler does not see that y is global memory
  }
};

template <typename T>
SeqSum<T> make_seq_sum(const Tensor& y, const Tensor& x, const Tensor& seqlens) {
  const bool packed = x.dim() == 1;
  STD_TORCH_CHECK(packed || x.dim() == 2, "seq_sum: x must have 1 or 2 dimensions, got ", x.dim());
  const int64_t longest = x.size(x.dim() - 1);
  if (packed) check_sizes(y, "seq_sum: y", {longest});
  else check_sizes(y, "seq_sum: y", {x.size(0), longest});
  check_rows(y, "seq_sum: y"), check_rows(x, "seq_sum: x");
  check_rank(seqlens, "seq_sum: seqlens", 1);
  check_rows(seqlens, "seq_sum: seqlens");
  const int64_t batch = packed ? seqlens.numel() - 1 : x.size(0);
  STD_TORCH_CHECK(batch >= 0, "seq_sum: seqlens of packed sequences must have at least one element");
  if (!packed && seqlens.numel() > 0) check_sizes(seqlens, "seq_sum: seqlens", {batch});

  SeqSum<T> p;
  p.y = output<T>(y, "seq_sum: y");
  p.x = input<T>(x, "seq_sum: x");
  check_dtype(seqlens, "seq_sum: seqlens", ScalarType::Int);
  p.seqlens = seqlens.numel() > 0 ? input<int32_t>(seqlens, "seq_sum: seqlens") : nullptr;
  p.packed = packed;
  p.batch = to_int(batch, "seq_sum: x"), p.longest = to_int(longest, "seq_sum: x");
  // So that an index that is a block's width behind a row's end fits 32 bits.
  STD_TORCH_CHECK(longest <= INT_MAX / 2, "seq_sum: x must have fewer than 2^30 elements in a row, got ", longest);
  p.y_stride = packed || batch < 2 ? longest : y.stride(0), p.x_stride = packed || batch < 2 ? longest : x.stride(0);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(SeqSum<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& seqlens, Launch launch) {
  dispatch<float, BFloat16>(x.scalar_type(), "seq_sum: x", [&]<typename T>() {
    const SeqSum<T> p = make_seq_sum<T>(y, x, seqlens);
    if (y.numel() > 0) launch(p);
  });
  check_launch();
}

}  // namespace minfer

// The launch comes last, so that it may be a template with several arguments.
#define MINFER_SEQ_SUM(NAME, ...)                                                            \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor seqlens) { \
    minfer::dispatch(y, x, seqlens, [](const auto& p) { __VA_ARGS__(p); });                  \
  }                                                                                          \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, Tensor seqlens) -> ()")
