// An op with every kind of argument, and what a kernel must not do with it, one thing for each `mistake`.
#include "ops/op.h"

using minfer::Tensor;

__global__ void touch(float* out, int64_t* state, int64_t state_stride, const minfer::Float8E4M3* bytes,
                      const int32_t* deep, int64_t deep_stride, int64_t mistake, bool twice, float scale) {
  const int x = threadIdx.x;
  out[x] = scale * (twice ? 2 : 1) * deep[x * deep_stride] + float(static_cast<uint8_t>(bytes[x]));
  for (int row = 0; row < 2; ++row) state[row * state_stride + x] += row;
  if (mistake == 1) const_cast<minfer::Float8E4M3*>(bytes)[x] = {};
  if (mistake == 2) out[x] = deep[(1 << 14) + x];
  if (mistake == 3) state[4] = 0;  // behind the first row
}

static void test_anything(Tensor out, Tensor state, const Tensor bytes, const Tensor deep, int64_t mistake, bool twice,
                          double scale) {
  minfer::check_contiguous(out, "anything: out");
  minfer::check_rank(deep, "anything: deep", 8);
  touch<<<1, 4, 0, minfer::stream_of(out)>>>(
      minfer::output<float>(out, "anything: out"), minfer::output<int64_t>(state, "anything: state"), state.stride(0),
      minfer::input<minfer::Float8E4M3>(bytes, "anything: bytes"), minfer::input<int32_t>(deep, "anything: deep"),
      deep.stride(-1), mistake, twice, static_cast<float>(scale));
  minfer::check_launch();
}

MINFER_OP(test_anything, "(Tensor(a!) out, Tensor(b!) state, Tensor bytes, Tensor deep, int mistake=0, "
                         "bool twice=False, float scale=0.5) -> ()")
