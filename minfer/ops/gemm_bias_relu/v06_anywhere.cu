// v06_anywhere: any sizes, strides and addresses, with mma.sync; bias and ReLU on the sums in registers.
// Idea: cp.async moves at least 4 bytes from a multiple of 4. So while a tile is multiplied, each thread loads elements of the
// next one into registers, 2 bytes at a time, and stores them in shared memory afterwards. From there on all is as in v02. An operand
// whose rows all start at multiples of 16 bytes, as in TN both do if only n is odd, moves in pieces of 16 bytes.
// Expected (H100): 100 TFLOP/s at m=n=k=4095, as a warp has 64 loads and stores of 2 bytes for 16 products; 200 in TN if only n
// is odd.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biased_anywhere.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g) {
  launch_anywhere(g, Relu{});
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v06_anywhere, minfer::launch)
