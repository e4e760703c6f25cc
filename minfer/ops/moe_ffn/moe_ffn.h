// What every CUDA and C++ moe_ffn kernel is given, and how it becomes a torch op. What the tensors are: __init__.py.
//
// A kernel file defines `template <typename T> void launch(const Experts<T>&)` and ends with
// `MINFER_MOE_FFN(moe_ffn_<file name>, launch)`. T is a half type of the device.
#pragma once

#include <cmath>

#include "ops/op.h"

namespace minfer {

// Rows of x and out are contiguous and ldx and ldo elements apart; all other tensors are contiguous.
template <typename T>
struct Experts {
  T* out;
  const T* x;
  const float* weights;
  const int32_t *indices, *offsets, *order;
  const T *gate_up, *down;
  int tokens, slots, experts, k, hidden, ffn;
  int64_t ldx, ldo;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// silu(gate) * up. It holds for gates of any size: exp(-gate) may be infinite, and divides what is finite.
#ifdef __CUDACC__
__device__ inline float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
#else
inline float swiglu(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }
#endif

template <typename T>
Experts<T> make_experts(const Tensor& out, const Tensor& x, const Tensor& weights, const Tensor& indices,
                        const Tensor& offsets, const Tensor& order, const Tensor& gate_up, const Tensor& down) {
  check_rank(x, "moe_ffn: x", 2);
  check_rank(weights, "moe_ffn: weights", 2);
  check_rank(down, "moe_ffn: down", 3);
  const int64_t tokens = x.size(0), hidden = x.size(1), k = weights.size(1), experts = down.size(0), ffn = down.size(2);
  check_sizes(out, "moe_ffn: out", {tokens, hidden});
  check_sizes(weights, "moe_ffn: weights", {tokens, k});
  check_sizes(indices, "moe_ffn: indices", {tokens, k});
  check_sizes(offsets, "moe_ffn: offsets", {experts});
  check_sizes(order, "moe_ffn: order", {tokens * k});
  check_sizes(gate_up, "moe_ffn: gate_up", {experts, 2 * ffn, hidden});
  check_sizes(down, "moe_ffn: down", {experts, hidden, ffn});
  check_rows(x, "moe_ffn: x");
  check_rows(out, "moe_ffn: out");
  check_contiguous(weights, "moe_ffn: weights");
  check_contiguous(indices, "moe_ffn: indices");
  check_contiguous(offsets, "moe_ffn: offsets");
  check_contiguous(order, "moe_ffn: order");
  check_contiguous(gate_up, "moe_ffn: gate_up");
  check_contiguous(down, "moe_ffn: down");

  Experts<T> p;
  p.out = output<T>(out, "moe_ffn: out");
  p.x = input<T>(x, "moe_ffn: x");
  p.weights = input<float>(weights, "moe_ffn: weights");
  p.indices = input<int32_t>(indices, "moe_ffn: indices");
  p.offsets = input<int32_t>(offsets, "moe_ffn: offsets");
  p.order = input<int32_t>(order, "moe_ffn: order");
  p.gate_up = input<T>(gate_up, "moe_ffn: gate_up");
  p.down = input<T>(down, "moe_ffn: down");
  p.tokens = to_int(tokens, "moe_ffn: x"), p.slots = to_int(tokens * k, "moe_ffn: order");
  p.experts = to_int(experts, "moe_ffn: down"), p.k = to_int(k, "moe_ffn: weights");
  p.hidden = to_int(hidden, "moe_ffn: x"), p.ffn = to_int(ffn, "moe_ffn: down");
  to_int(experts * 2 * ffn, "moe_ffn: gate_up"), to_int(experts * hidden, "moe_ffn: down");
  p.ldx = tokens > 1 ? x.stride(0) : hidden, p.ldo = tokens > 1 ? out.stride(0) : hidden;
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Throws unless 16 bytes at once may be read and written of each row.
template <typename T>
void require_pieces(const Experts<T>& p) {
  check_pieces(p.out, p.hidden, p.ldo, "moe_ffn: out");
  check_pieces(p.x, p.hidden, p.ldx, "moe_ffn: x");
  check_pieces(p.gate_up, p.hidden, p.hidden, "moe_ffn: gate_up");
  check_pieces(p.down, p.ffn, p.ffn, "moe_ffn: down");
}

// Calls launch(Experts<T>) with the T of the tensors.
template <typename Launch>
void dispatch_experts(const Tensor& out, const Tensor& x, const Tensor& weights, const Tensor& indices,
                      const Tensor& offsets, const Tensor& order, const Tensor& gate_up, const Tensor& down,
                      Launch launch) {
  STD_TORCH_CHECK(out.numel() > 0 && weights.numel() > 0 && down.numel() > 0,
                  "moe_ffn: x, weights and down must have elements");
  dispatch<Half, BFloat16>(x.scalar_type(), "moe_ffn: x", [&]<typename T>() {
    launch(make_experts<T>(out, x, weights, indices, offsets, order, gate_up, down));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_MOE_FFN(NAME, LAUNCH)                                                                                  \
  static void NAME(minfer::Tensor out, const minfer::Tensor x, const minfer::Tensor weights,                          \
                   const minfer::Tensor indices, const minfer::Tensor offsets, const minfer::Tensor order,            \
                   const minfer::Tensor gate_up, const minfer::Tensor down) {                                         \
    minfer::dispatch_experts(out, x, weights, indices, offsets, order, gate_up, down,                                 \
                             [](const auto& p) { LAUNCH(p); });                                                       \
  }                                                                                                                   \
  MINFER_OP(NAME,                                                                                                     \
            "(Tensor(a!) out, Tensor x, Tensor weights, Tensor indices, Tensor offsets, Tensor order, Tensor gate_up, " \
            "Tensor down) -> ()")
