// The finish of hgemm's fitted tiles that adds a bias and applies an activation.
#pragma once

#include "gemm_bias_relu.h"
#include "cuda/gemm/fitted_launch.cuh"

namespace minfer {

// The biases of two columns; 0 beyond the last column.
template <typename T, typename Activation>
struct BiasedColumns {
  float bias[2];
  Activation activation;

  template <typename Problem>
  __device__ BiasedColumns(const Problem& g, int col)
      : bias{col < g.n ? float(g.bias[col]) : 0.0f, col + 8 < g.n ? float(g.bias[col + 8]) : 0.0f},
        activation(activation_of(g)) {}
  __device__ float operator()(float sum, bool second) const { return activation(sum + bias[second]); }  //@ second_bias
};

}  // namespace minfer
