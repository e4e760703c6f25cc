// v06_fp8_one_wave: up to 128 rows of x; hgemm's v17 with e4m3: a block for each N-slice of W, all of them at once.
// Idea: with few rows the time is that of reading W, and v05 has too few tiles of 128 x 256 to keep all SMs reading. v17's
// N-slices make one wave of blocks, which keep shared memory full of copies from the first microsecond to the last. Scales
// of columns are read during the first copies. A step in k has 128 fp8 elements, so there are half as many steps as in v17.
// Expected (16 x 28672 x 4096): 117 MB of W at 4.2 TB/s take 28 us; the launch, the first bytes and the last ones take 5 us.
// Measured (H200, bfloat16, fp8_fp8, fast, m=16, n=28672, k=4096): 112.7 TFLOP/s cold.
#include "fp8_slices.cuh"

namespace minfer {

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  launch_slices<false>(p);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v06_fp8_one_wave, false, true, minfer::launch)
