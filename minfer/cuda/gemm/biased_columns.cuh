// Bias and activation as the finish of fitted tiles.
#pragma once

#include "cuda/gemm/biases.cuh"
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
        activation(g.activation) {}
  __device__ float operator()(float sum, bool second) const { return activation(sum + bias[second]); }  //@ second_bias
};

template <typename T, typename Activation>
void launch_fitting_biased(const Biased<T>& biased, Activation activation) {
  require_rows(biased);
  const Activated<T, Activation> g{biased, activation};
  using Finish = BiasedColumns<T, Activation>;
  g.layout == Layout::TN ? launch_fitting_many_rows<Layout::TN, Finish>(g) : launch_fitting_many_rows<Layout::NN, Finish>(g);
}

}  // namespace minfer
