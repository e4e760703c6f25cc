// threads: both calls, a thread an element.
#include "ops/op.h"

using minfer::Tensor;

constexpr int kThreads = 128;
enum Call { forward, backward };

// The outputs are y, or d_gate and d_up.
template <typename T, Call call>
__global__ void __launch_bounds__(kThreads)
    swiglu(T* first, T* second, const T* gate, const T* up, const T* dy, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float x = float(gate[i]), s = 1.0f / (1.0f + expf(-x));
  if constexpr (call == forward) {
    first[i] = T(x * s * float(up[i]));
  } else {
    const float grad = float(dy[i]);
    first[i] = T(grad * float(up[i]) * s * (1.0f + x * (1.0f - s)));
    second[i] = T(grad * x * s);
  }
}

static void check(const Tensor& tensor, const char* who, const Tensor& like) {
  minfer::check_sizes(tensor, who, {like.size(0), like.size(1)});
  minfer::check_contiguous(tensor, who);
}

static int blocks(const Tensor& gate) { return minfer::to_int((gate.numel() + kThreads - 1) / kThreads, "swiglu: gate"); }

static void foreign_swiglu_threads(Tensor y, const Tensor gate, const Tensor up) {
  check(y, "swiglu: y", gate), check(gate, "swiglu: gate", gate), check(up, "swiglu: up", gate);
  const cudaStream_t stream = minfer::stream_of(gate);
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(gate.scalar_type(), "swiglu: gate", [&]<typename T>() {
    const T *g = minfer::input<T>(gate, "swiglu: gate"), *u = minfer::input<T>(up, "swiglu: up");
    T* to = minfer::output<T>(y, "swiglu: y");
    swiglu<T, forward><<<blocks(gate), kThreads, 0, stream>>>(to, nullptr, g, u, nullptr, gate.numel());
  });
  minfer::check_launch();
}

static void foreign_swiglu_threads_backward(Tensor d_gate, Tensor d_up, const Tensor gate, const Tensor up,
                                            const Tensor dy) {
  check(d_gate, "swiglu: d_gate", gate), check(d_up, "swiglu: d_up", gate), check(gate, "swiglu: gate", gate);
  check(up, "swiglu: up", gate), check(dy, "swiglu: dy", gate);
  const cudaStream_t stream = minfer::stream_of(gate);
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(gate.scalar_type(), "swiglu: gate", [&]<typename T>() {
    const T *g = minfer::input<T>(gate, "swiglu: gate"), *u = minfer::input<T>(up, "swiglu: up");
    const T* d = minfer::input<T>(dy, "swiglu: dy");
    T *to_gate = minfer::output<T>(d_gate, "swiglu: d_gate"), *to_up = minfer::output<T>(d_up, "swiglu: d_up");
    swiglu<T, backward><<<blocks(gate), kThreads, 0, stream>>>(to_gate, to_up, g, u, d, gate.numel());
  });
  minfer::check_launch();
}

MINFER_OP(foreign_swiglu_threads, "(Tensor(a!) y, Tensor gate, Tensor up) -> ()")
MINFER_OP(foreign_swiglu_threads_backward,
          "(Tensor(a!) d_gate, Tensor(b!) d_up, Tensor gate, Tensor up, Tensor dy) -> ()")
