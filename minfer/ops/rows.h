// The rows of a tensor of four dimensions, such as q or a cache: a row is one head of one token.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of contiguous elements: (outer, inner, heads, elements). Strides in elements.
template <typename T>
struct Rows {
  T* begin;
  int64_t of_outer, of_inner, of_head;

  MINFER_EITHER T* at(int64_t outer, int64_t inner, int head) const {
    return begin + outer * of_outer + inner * of_inner + head * of_head;
  }
};

// The stride of a dimension; 0 for one of a single element, whose stride means nothing.
inline int64_t stride_or_0(const Tensor& tensor, int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; }

template <typename Element>
Rows<Element> make_rows(const Tensor& tensor, Element* begin, const char* who) {
  check_rank(tensor, who, 4), check_rows(tensor, who);
  return {begin, stride_or_0(tensor, 0), stride_or_0(tensor, 1), stride_or_0(tensor, 2)};
}

// Throws unless rows of `dim` elements can be read and written 16 bytes at a time.
template <typename Element>
void check_rows_in_pieces(const Rows<Element>& rows, int dim, const char* who) {
  check_pieces(rows.begin, dim, rows.of_outer, who);
  check_pieces(rows.begin, dim, rows.of_inner, who);
  check_pieces(rows.begin, dim, rows.of_head, who);
}

}  // namespace minfer
