// Bias and activation in the kernels of `one_wave.cuh` and `strips.cuh`.
#pragma once

#include "cuda/gemm/biases.cuh"
#include "cuda/gemm/strips.cuh"

namespace minfer {

// The biases are loaded while the first copies are in flight. Where a thread has so many sums that it has no registers for
// biases, they are loaded after the products.
template <typename Tile, typename T, typename Activation>
struct Epilogue<Tile, Activated<T, Activation>> {
  static constexpr bool kEarly = Tile::kRegisters <= 64;
  Biases<T, kEarly ? Tile::kRegisters * 2 : 8> biases;
  int col0;

  __device__ Epilogue(const Activated<T, Activation>& g, int col0) : biases(g, col0), col0(col0) {}
  __device__ void operator()(Tile& tile, const Activated<T, Activation>& g, int, int) const {
    if constexpr (kEarly)
      biases.apply(tile.sums[0], g.activation);
    else
#pragma unroll
      for (int j = 0; j < Tile::kRegisters / 16; ++j) {
        int col = col0 + j * 32;  //@ late_biases
        asm volatile("" : "+r"(col));  // no biases of the next columns are loaded yet
        Biases<T, 32>(g, col).apply(reinterpret_cast<float(&)[16]>(tile.sums[0][j * 16]), g.activation);
      }
  }
};

}  // namespace minfer
