// warps: a block of one warp for each element of y; a lane takes every 32nd byte.
#include "ops/op.h"

using minfer::Tensor;

constexpr int kLanes = 32;

template <typename T>
__global__ void __launch_bounds__(kLanes)
    product(T* y, const T* x, const uint8_t* w, const float* scales, int n, int k) {
  __shared__ float partial[kLanes];
  const int64_t row = blockIdx.y, column = blockIdx.x;
  float sum = 0;
  for (int i = threadIdx.x; i < k / 2; i += kLanes) {
    const int packed = w[column * (k / 2) + i];
    const float scale = scales[column * (k / 32) + i / 16];
    sum += float(x[row * k + 2 * i]) * (((packed & 15) - 8) * scale);
    sum += float(x[row * k + 2 * i + 1]) * (((packed >> 4) - 8) * scale);
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kLanes / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[row * n + column] = T(partial[0]);
}

static void foreign_int4_warps(Tensor y, const Tensor x, const Tensor w, const Tensor scales) {
  const int m = minfer::to_int(x.size(0), "int4: x"), k = minfer::to_int(x.size(1), "int4: x");
  const int n = minfer::to_int(w.size(0), "int4: w");
  minfer::check_sizes(y, "int4: y", {m, n});
  minfer::check_sizes(w, "int4: w", {n, k / 2});
  minfer::check_sizes(scales, "int4: scales", {n, k / 32});
  minfer::check_contiguous(y, "int4: y");
  minfer::check_contiguous(x, "int4: x");
  minfer::check_contiguous(w, "int4: w");
  minfer::check_contiguous(scales, "int4: scales");
  const cudaStream_t stream = minfer::stream_of(x);
  const dim3 grid(n, m);
  const uint8_t* bytes = minfer::input<uint8_t>(w, "int4: w");
  const float* scale = minfer::input<float>(scales, "int4: scales");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(x.scalar_type(), "int4: x", [&]<typename T>() {
    T* to = minfer::output<T>(y, "int4: y");
    product<T><<<grid, kLanes, 0, stream>>>(to, minfer::input<T>(x, "int4: x"), bytes, scale, n, k);
  });
  minfer::check_launch();
}

MINFER_OP(foreign_int4_warps, "(Tensor(a!) y, Tensor x, Tensor w, Tensor scales) -> ()")
