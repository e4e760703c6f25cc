// What TMA makes of a box in shared memory, under each of its swizzles: `out` gets the 1024 bytes of shared memory into which
// a box of `words` was loaded. Both are 256 words; a row of the box is as long as the swizzle's span (without one 128 bytes).
#include "cuda/hopper.cuh"
#include "ops/op.h"

using minfer::Tensor;

constexpr int kBytes = 1024, kThreads = 32;

__global__ void load_box(int32_t* out, const __grid_constant__ minfer::TensorMap map) {
  extern __shared__ __align__(1024) unsigned char box[];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    minfer::barrier_init(&barrier, 1);
    minfer::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    minfer::barrier_expect(&barrier, kBytes);
    minfer::tma_load(box, map, &barrier, 0, 0);
  }
  minfer::barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < kBytes / 4; i += kThreads) out[i] = reinterpret_cast<const int32_t*>(box)[i];
}

static void tools_print_swizzle(Tensor out, const Tensor words, int64_t span) {
  STD_TORCH_CHECK(span == 0 || span == 32 || span == 64 || span == 128, "swizzle: span must be 0, 32, 64 or 128, got ",
                  span);
  minfer::check_sizes(out, "swizzle: out", {kBytes / 4});
  minfer::check_sizes(words, "swizzle: words", {kBytes / 4});
  const int row = span ? static_cast<int>(span) : 128, cols = row / 2;  // a tensor map of 16-bit elements
  int32_t* to = minfer::output<int32_t>(out, "swizzle: out");
  const auto* from = reinterpret_cast<const minfer::Half*>(minfer::input<int32_t>(words, "swizzle: words"));
  minfer::TensorMap map;
  STD_TORCH_CHECK(minfer::make_tensor_map(map, from, kBytes / row, cols, cols, kBytes / row, cols, static_cast<int>(span)),
                  "swizzle: the driver refuses the tensor map");
  load_box<<<1, kThreads, kBytes, minfer::stream_of(out)>>>(to, map);
  minfer::check_launch();
}

MINFER_OP(tools_print_swizzle, "(Tensor(a!) out, Tensor words, int span) -> ()")
