// loops: both calls, element by element.
#include <cmath>

#include "ops/op.h"

using minfer::Tensor;

static void check(const Tensor& tensor, const char* who, const Tensor& like) {
  minfer::check_sizes(tensor, who, {like.size(0), like.size(1)});
  minfer::check_contiguous(tensor, who);
}

static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

static void foreign_swiglu_loops(Tensor y, const Tensor gate, const Tensor up) {
  check(y, "swiglu: y", gate), check(gate, "swiglu: gate", gate), check(up, "swiglu: up", gate);
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(gate.scalar_type(), "swiglu: gate", [&]<typename T>() {
    T* to = minfer::output<T>(y, "swiglu: y");
    const T *g = minfer::input<T>(gate, "swiglu: gate"), *u = minfer::input<T>(up, "swiglu: up");
    for (int64_t i = 0; i < gate.numel(); ++i) {
      const float x = static_cast<float>(g[i]);
      to[i] = static_cast<T>(x * sigmoid(x) * static_cast<float>(u[i]));
    }
  });
}

static void foreign_swiglu_loops_backward(Tensor d_gate, Tensor d_up, const Tensor gate, const Tensor up, const Tensor dy) {
  check(d_gate, "swiglu: d_gate", gate), check(d_up, "swiglu: d_up", gate), check(gate, "swiglu: gate", gate);
  check(up, "swiglu: up", gate), check(dy, "swiglu: dy", gate);
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(gate.scalar_type(), "swiglu: gate", [&]<typename T>() {
    T *to_gate = minfer::output<T>(d_gate, "swiglu: d_gate"), *to_up = minfer::output<T>(d_up, "swiglu: d_up");
    const T *g = minfer::input<T>(gate, "swiglu: gate"), *u = minfer::input<T>(up, "swiglu: up");
    const T* d = minfer::input<T>(dy, "swiglu: dy");
    for (int64_t i = 0; i < gate.numel(); ++i) {
      const float x = static_cast<float>(g[i]), grad = static_cast<float>(d[i]), s = sigmoid(x);
      to_gate[i] = static_cast<T>(grad * static_cast<float>(u[i]) * s * (1.0f + x * (1.0f - s)));
      to_up[i] = static_cast<T>(grad * x * s);
    }
  });
}

MINFER_OP(foreign_swiglu_loops, "(Tensor(a!) y, Tensor gate, Tensor up) -> ()")
MINFER_OP(foreign_swiglu_loops_backward,
          "(Tensor(a!) d_gate, Tensor(b!) d_up, Tensor gate, Tensor up, Tensor dy) -> ()")
