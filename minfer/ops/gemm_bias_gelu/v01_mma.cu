// v01_mma: gemm_bias_relu's v02 with GELU: tiles of cp.async and mma.sync, and bias and activation applied to the sums in
// registers.
// Idea: GELU takes some 20 operations an element, which hide behind the tile's 2 k multiply-adds an element. A separate GELU
// kernel would read and write the output once more.
// Expected: 2 % slower than gemm_bias_relu's v02 at 1024x256x512, where no other block hides the epilogue; equal at 8192.
// Measured (H200, float16, TN, m=n=k=8192): 392.0 TFLOP/s cold; 53.5 % of torch.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biased_mma.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  launch_mma(g, gelu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v01_mma, minfer::launch)
