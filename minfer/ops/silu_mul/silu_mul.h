// What every CUDA and C++ silu_mul kernel is given, and how it becomes two torch ops.
//
// Forward: y = silu(gate) * up. Backward: from dy, d_gate = dy * up * silu'(gate) and d_up = dy * silu(gate). Both with
// fp32 arithmetic and one rounding, of the result. silu(x) = x * sigmoid(x) (Elfwing, Uchibe and Doya, "Sigmoid-weighted
// linear units for neural network function approximation in reinforcement learning", 2018).
//
// A kernel file defines `template <typename T, typename Function> void launch(const Rows<T, Function>&)`, which applies
// Function() to each element, and ends with `MINFER_SILU_MUL(silu_mul_<file name>, launch)`. T is float or a half type.
#pragma once

#include <cmath>

#include "ops/op.h"

namespace minfer {

// sigmoid(x) and sigmoid(-x). exp(-|x|) is at most 1, so that no sum overflows and both are exact to a few roundings:
// 1 - sigmoid(x) would lose all of its digits for a large x.
struct Sigmoid {
  float of, of_negative;

  MINFER_EITHER explicit Sigmoid(float x) {
#ifdef __CUDA_ARCH__
    const float small = __expf(-fabsf(x)), larger = __fdividef(1.0f, 1.0f + small);
#else
    const float small = std::exp(-std::fabs(x)), larger = 1.0f / (1.0f + small);
#endif
    of = x >= 0.0f ? larger : small * larger, of_negative = x >= 0.0f ? small * larger : larger;
  }
};

struct Forward {
  static constexpr int kInputs = 2, kOutputs = 1;  // gate and up; y

  MINFER_EITHER void operator()(const float (&x)[kInputs], float (&y)[kOutputs]) const {
    y[0] = x[0] * Sigmoid(x[0]).of * x[1];
  }
};

struct Backward {
  static constexpr int kInputs = 3, kOutputs = 2;  // gate, up and dy; d_gate and d_up

  MINFER_EITHER void operator()(const float (&x)[kInputs], float (&y)[kOutputs]) const {
    const Sigmoid sigmoid(x[0]);
    y[0] = x[2] * x[1] * sigmoid.of * (1.0f + x[0] * sigmoid.of_negative);
    y[1] = x[2] * x[0] * sigmoid.of;
  }
};

// Rows of each tensor are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T, typename Function>
struct Rows {
  using Element = T;
  static constexpr int kInputs = Function::kInputs, kOutputs = Function::kOutputs;
  const T* input[kInputs];
  T* output[kOutputs];
  int64_t input_stride[kInputs], output_stride[kOutputs];
  int tokens, hidden;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

inline const char* kInputNames[] = {"silu_mul: gate", "silu_mul: up", "silu_mul: dy"};
inline const char* kOutputNames[][2] = {{"silu_mul: y", ""}, {"silu_mul: d_gate", "silu_mul: d_up"}};

template <typename Function>
const char* output_name(int i) {
  return kOutputNames[Function::kOutputs - 1][i];
}

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T, typename Function>
void require_vectors(const Rows<T, Function>& p) {
  for (int i = 0; i < p.kOutputs; ++i)
    check_pieces(p.output[i], p.hidden, p.output_stride[i], output_name<Function>(i));
  for (int i = 0; i < p.kInputs; ++i) check_pieces(p.input[i], p.hidden, p.input_stride[i], kInputNames[i]);
}

// Rows that lie side by side in every tensor are one long row.
template <typename T, typename Function>
Rows<T, Function> joined(Rows<T, Function> p) {
  bool dense = static_cast<int64_t>(p.tokens) * p.hidden <= INT_MAX;
  for (const int64_t stride : p.input_stride) dense &= stride == p.hidden;
  for (const int64_t stride : p.output_stride) dense &= stride == p.hidden;
  if (dense) p.hidden *= p.tokens, p.tokens = 1;
  return p;
}

template <typename T, typename Function>
Rows<T, Function> make_rows(const Tensor* outputs, const Tensor* inputs) {
  const Tensor& gate = inputs[0];
  check_rank(gate, "silu_mul: gate", 2);
  const int64_t tokens = gate.size(0), hidden = gate.size(1);
  const auto stride = [&](const Tensor& tensor, const char* who) {
    check_sizes(tensor, who, {tokens, hidden});
    check_rows(tensor, who);
    return tokens > 1 ? tensor.stride(0) : hidden;
  };
  Rows<T, Function> p;
  for (int i = 0; i < p.kOutputs; ++i) {
    p.output_stride[i] = stride(outputs[i], output_name<Function>(i));
    p.output[i] = output<T>(outputs[i], output_name<Function>(i));
  }
  for (int i = 0; i < p.kInputs; ++i) {
    p.input_stride[i] = stride(inputs[i], kInputNames[i]);
    p.input[i] = input<T>(inputs[i], kInputNames[i]);
  }
  p.tokens = to_int(tokens, "silu_mul: gate"), p.hidden = to_int(hidden, "silu_mul: gate");
#ifdef __CUDACC__
  p.stream = stream_of(gate);
#endif
  return p;
}

// Calls launch(Rows<T, Function>) with the T of the tensors; an empty output is no work.
template <typename Function, typename Launch>
void dispatch(const Tensor* outputs, const Tensor* inputs, Launch launch) {
  if (inputs[0].numel() == 0) return;
  dispatch<float, Half, BFloat16>(inputs[0].scalar_type(), "silu_mul: gate",
                                  [&]<typename T>() { launch(make_rows<T, Function>(outputs, inputs)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_SILU_MUL(NAME, LAUNCH)                                                                           \
  static void NAME(minfer::Tensor y, const minfer::Tensor gate, const minfer::Tensor up) {                      \
    const minfer::Tensor inputs[] = {gate, up};                                                                 \
    minfer::dispatch<minfer::Forward>(&y, inputs, [](const auto& p) { LAUNCH(p); });                            \
  }                                                                                                             \
  static void NAME##_backward(minfer::Tensor d_gate, minfer::Tensor d_up, const minfer::Tensor gate,            \
                              const minfer::Tensor up, const minfer::Tensor dy) {                               \
    const minfer::Tensor outputs[] = {d_gate, d_up}, inputs[] = {gate, up, dy};                                 \
    minfer::dispatch<minfer::Backward>(outputs, inputs, [](const auto& p) { LAUNCH(p); });                      \
  }                                                                                                             \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor gate, Tensor up) -> ()")                                               \
  MINFER_OP(NAME##_backward, "(Tensor(a!) d_gate, Tensor(b!) d_up, Tensor gate, Tensor up, Tensor dy) -> ()")
