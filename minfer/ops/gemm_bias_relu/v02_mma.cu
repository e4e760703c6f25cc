// v02_mma: hgemm's tiles of cp.async and mma.sync, with bias and ReLU on the sums in registers.
// Idea: an epilogue is free: a tile's sums are in registers anyway, and the bias of 64 columns is 128 bytes. Tiles of 64 x 64
// with eight stages in flight where larger ones leave multiprocessors idle, of 128 x 128 otherwise.
// Expected: 1024x256x512 in 8 us on an H200: 64 blocks, 16 steps of 32 each; for large squares what hgemm's v05 reaches.
// Measured (H200, float16, TN, m=n=k=8192): 383.0 TFLOP/s cold; 52.6 % of torch.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biased_mma.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g) {
  launch_mma(g, Relu{});
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v02_mma, minfer::launch)
