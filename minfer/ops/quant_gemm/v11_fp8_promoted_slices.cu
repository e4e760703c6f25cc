// v11_fp8_promoted_slices: up to 128 rows of x; v06 with v08's sums: a block for each N-slice of W, all of them at once.
// Idea: v08's tiles of 128 x 256 are too few to keep all SMs reading W, and v04's copies stop at each barrier. Here a
// warpgroup waits for the tensor cores' sums of each stage and adds them up in registers. With few rows this wait is hidden: W
// takes longer to arrive than to multiply.
// Expected (16 x 28672 x 4096, H200): v06's 33 us, where v04 takes 61.
// Measured (H200, bfloat16, fp8_fp8, promoted, m=16, n=28672, k=4096): 106.1 TFLOP/s cold.
#include "fp8_slices.cuh"

namespace minfer {

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  launch_slices<true>(p);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v11_fp8_promoted_slices, false, true, minfer::launch)
