// What every CUDA and C++ silu_mul_quant kernel is given, and how it becomes a torch op.
//
// silu(gate) * up with fp32 arithmetic, and its rows as bytes with a scale each (`ops/row_quant.h`), rounded once.
//
// A kernel file defines `template <typename T, typename Y> void launch(const SiluMulQuant<T, Y>&)` and ends with
// `MINFER_SILU_MUL_QUANT(silu_mul_quant_<file name>, launch)`. T is float or a half type, Y is Float8E4M3 or int8_t.
#pragma once

#include <cmath>

#include "ops/row_quant.h"

namespace minfer {

// Rows of gate and up are contiguous and their strides, in elements, may exceed `hidden`; y is dense.
template <typename T, typename Y>
struct SiluMulQuant {
  Y* y;
  float* scales;
  const T *gate, *up;
  int64_t gate_stride, up_stride;
  int tokens, hidden;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// exp(-|x|) is at most 1, so that nothing overflows.
MINFER_EITHER inline float silu_times(float x, float up) {
#ifdef __CUDA_ARCH__
  const float small = __expf(-fabsf(x)), larger = __fdividef(1.0f, 1.0f + small);
#else
  const float small = std::exp(-std::fabs(x)), larger = 1.0f / (1.0f + small);
#endif
  return x * (x >= 0.0f ? larger : small * larger) * up;
}

// Throws unless rows can be read 16 bytes at a time, and be written in as many pieces.
template <typename T, typename Y>
void require_vectors(const SiluMulQuant<T, Y>& p) {
  check_pieces(p.gate, p.hidden, p.gate_stride, "silu_mul_quant: gate");
  check_pieces(p.up, p.hidden, p.up_stride, "silu_mul_quant: up");
  check_pieces(p.y, p.hidden, p.hidden, "silu_mul_quant: y", 16 / sizeof(T));
}

template <typename T, typename Y>
SiluMulQuant<T, Y> make_silu_mul_quant(const Tensor& y, const Tensor& scales, const Tensor& gate, const Tensor& up) {
  check_rank(gate, "silu_mul_quant: gate", 2);
  const int64_t tokens = gate.size(0), hidden = gate.size(1);
  check_sizes(y, "silu_mul_quant: y", {tokens, hidden}), check_contiguous(y, "silu_mul_quant: y");
  check_sizes(scales, "silu_mul_quant: scales", {tokens}), check_contiguous(scales, "silu_mul_quant: scales");
  check_sizes(up, "silu_mul_quant: up", {tokens, hidden});
  check_rows(gate, "silu_mul_quant: gate"), check_rows(up, "silu_mul_quant: up");
  SiluMulQuant<T, Y> p;
  p.y = output<Y>(y, "silu_mul_quant: y"), p.scales = output<float>(scales, "silu_mul_quant: scales");
  p.gate = input<T>(gate, "silu_mul_quant: gate"), p.up = input<T>(up, "silu_mul_quant: up");
  p.gate_stride = tokens > 1 ? gate.stride(0) : hidden, p.up_stride = tokens > 1 ? up.stride(0) : hidden;
  p.tokens = to_int(tokens, "silu_mul_quant: gate"), p.hidden = to_int(hidden, "silu_mul_quant: gate");
#ifdef __CUDACC__
  p.stream = stream_of(gate);
#endif
  return p;
}

// Calls launch(SiluMulQuant<T, Y>) with the types of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& scales, const Tensor& gate, const Tensor& up, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(gate.scalar_type(), "silu_mul_quant: gate", [&]<typename T>() {
    dispatch<Float8E4M3, int8_t>(y.scalar_type(), "silu_mul_quant: y", [&]<typename Y>() {
      launch(make_silu_mul_quant<T, Y>(y, scales, gate, up));
    });
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_SILU_MUL_QUANT(NAME, LAUNCH)                                                                \
  static void NAME(minfer::Tensor y, minfer::Tensor scales, const minfer::Tensor gate, const minfer::Tensor up) { \
    minfer::dispatch(y, scales, gate, up, [](const auto& p) { LAUNCH(p); });                              \
  }                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor(b!) scales, Tensor gate, Tensor up) -> ()")
