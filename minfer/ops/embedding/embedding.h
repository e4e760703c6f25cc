// What every CUDA and C++ embedding kernel is given, and how it becomes a torch op.
//
// Row i of y is row ids[i] of the table. A row whose id is negative, or not below the table's length, is NaN: no kernel
// reads beyond the table, and the mistake shows in the first result that depends on it.
//
// A kernel file defines `template <typename T, typename Id> void launch(const Embedding<T, Id>&)` and ends with
// `MINFER_EMBEDDING(embedding_<file name>, launch)`. T is float or a half type, Id is int32_t or int64_t.
#pragma once

#include <cmath>

#include "ops/op.h"

namespace minfer {

// Rows of y and table are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T, typename Id>
struct Embedding {
  T* y;
  const Id* ids;
  const T* table;
  int tokens, hidden;
  int64_t vocab, y_stride, table_stride;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T, typename Id>
void require_vectors(const Embedding<T, Id>& p) {
  check_pieces(p.y, p.hidden, p.y_stride, "embedding: y");
  check_pieces(p.table, p.hidden, p.table_stride, "embedding: table");
}

template <typename T, typename Id>
Embedding<T, Id> make_embedding(const Tensor& y, const Tensor& ids, const Tensor& table) {
  const int64_t tokens = ids.size(0), hidden = table.size(1);
  check_sizes(y, "embedding: y", {tokens, hidden});
  check_rows(y, "embedding: y");
  check_rows(table, "embedding: table");
  check_contiguous(ids, "embedding: ids");

  Embedding<T, Id> p;
  p.y = output<T>(y, "embedding: y");
  p.ids = input<Id>(ids, "embedding: ids");
  p.table = input<T>(table, "embedding: table");
  p.tokens = to_int(tokens, "embedding: ids"), p.hidden = to_int(hidden, "embedding: table"), p.vocab = table.size(0);
  p.y_stride = tokens > 1 ? y.stride(0) : hidden, p.table_stride = p.vocab > 1 ? table.stride(0) : hidden;
#ifdef __CUDACC__
  p.stream = stream_of(table);
#endif
  return p;
}

// Calls launch(Embedding<T, Id>) with the types of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& ids, const Tensor& table, Launch launch) {
  check_rank(ids, "embedding: ids", 1);
  check_rank(table, "embedding: table", 2);
  if (y.numel() == 0) return;
  dispatch<int32_t, int64_t>(ids.scalar_type(), "embedding: ids", [&]<typename Id>() {
    dispatch<float, Half, BFloat16>(table.scalar_type(), "embedding: table",
                                    [&]<typename T>() { launch(make_embedding<T, Id>(y, ids, table)); });
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_EMBEDDING(NAME, LAUNCH)                                                                \
  static void NAME(minfer::Tensor y, const minfer::Tensor ids, const minfer::Tensor table) {          \
    minfer::dispatch(y, ids, table, [](const auto& p) { LAUNCH(p); });                                \
  }                                                                                                   \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor ids, Tensor table) -> ()")
