// What every CUDA and C++ moe_route kernel is given, and how it becomes a torch op. What the tensors are: __init__.py.
//
// A kernel file defines `template <typename T> void launch(const Route<T>&)` and ends with
// `MINFER_MOE_ROUTE(moe_route_<file name>, launch)`. T is float or bfloat16.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of logits are contiguous and `stride` elements apart; all other tensors are contiguous.
template <typename T>
struct Route {
  float* weights;
  int32_t *indices, *counts, *offsets, *order;
  const T* logits;
  int tokens, experts, k;
  int64_t stride;
  bool normalize;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

template <typename T>
Route<T> make_route(const Tensor& weights, const Tensor& indices, const Tensor& counts, const Tensor& offsets,
                    const Tensor& order, const Tensor& logits, bool normalize) {
  check_rank(logits, "moe_route: logits", 2);
  check_rank(weights, "moe_route: weights", 2);
  const int64_t tokens = logits.size(0), experts = logits.size(1), k = weights.size(1);
  check_sizes(weights, "moe_route: weights", {tokens, k});
  check_sizes(indices, "moe_route: indices", {tokens, k});
  check_sizes(counts, "moe_route: counts", {experts});
  check_sizes(offsets, "moe_route: offsets", {experts});
  check_sizes(order, "moe_route: order", {tokens * k});
  STD_TORCH_CHECK(k <= experts, "moe_route: weights must have at most as many columns as there are experts, ", experts,
                  ", got ", k);
  check_rows(logits, "moe_route: logits");
  check_contiguous(weights, "moe_route: weights");
  check_contiguous(indices, "moe_route: indices");
  check_contiguous(counts, "moe_route: counts");
  check_contiguous(offsets, "moe_route: offsets");
  check_contiguous(order, "moe_route: order");

  Route<T> p;
  p.weights = output<float>(weights, "moe_route: weights");
  p.indices = output<int32_t>(indices, "moe_route: indices");
  p.counts = output<int32_t>(counts, "moe_route: counts");
  p.offsets = output<int32_t>(offsets, "moe_route: offsets");
  p.order = output<int32_t>(order, "moe_route: order");
  p.logits = input<T>(logits, "moe_route: logits");
  to_int(tokens * k, "moe_route: order");
  p.tokens = to_int(tokens, "moe_route: logits"), p.experts = to_int(experts, "moe_route: logits");
  p.k = to_int(k, "moe_route: weights");
  p.stride = tokens > 1 ? logits.stride(0) : experts;
  p.normalize = normalize;
#ifdef __CUDACC__
  p.stream = stream_of(logits);
#endif
  return p;
}

// Calls launch(Route<T>) with the T of the logits; without slots there is nothing to write but zeros, which a caller does.
template <typename Launch>
void dispatch_route(const Tensor& weights, const Tensor& indices, const Tensor& counts, const Tensor& offsets,
                    const Tensor& order, const Tensor& logits, bool normalize, Launch launch) {
  STD_TORCH_CHECK(weights.numel() > 0, "moe_route: logits must have a token and weights a column");
  dispatch<float, BFloat16>(logits.scalar_type(), "moe_route: logits", [&]<typename T>() {
    launch(make_route<T>(weights, indices, counts, offsets, order, logits, normalize));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_MOE_ROUTE(NAME, LAUNCH)                                                                               \
  static void NAME(minfer::Tensor weights, minfer::Tensor indices, minfer::Tensor counts, minfer::Tensor offsets,    \
                   minfer::Tensor order, const minfer::Tensor logits, bool normalize) {                              \
    minfer::dispatch_route(weights, indices, counts, offsets, order, logits, normalize,                              \
                           [](const auto& p) { LAUNCH(p); });                                                        \
  }                                                                                                                  \
  MINFER_OP(NAME,                                                                                                    \
            "(Tensor(a!) weights, Tensor(b!) indices, Tensor(c!) counts, Tensor(d!) offsets, Tensor(e!) order, "     \
            "Tensor logits, bool normalize=True) -> ()")
