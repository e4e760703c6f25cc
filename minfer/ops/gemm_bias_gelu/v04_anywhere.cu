// v04_anywhere: gemm_bias_relu's v06 with GELU: any sizes, strides and addresses.
// Idea: the other rungs move 16 bytes at once, and so need n and k to be multiples of 8.
// Expected (H100): the speed of gemm_bias_relu's v06, as other blocks' loads and products run beside a block's GELU.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biased_anywhere.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  launch_anywhere(g, gelu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v04_anywhere, minfer::launch)
