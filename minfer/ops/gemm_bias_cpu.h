// The product with a bias of a cpu_naive kernel: three nested loops, accumulated in float32; threads share the rows.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "ops/gemm_bias.h"

namespace minfer {

// c = activation(a b + bias), with `float activation(float)`.
template <typename T, typename Activation>
void product_with_bias(const Biased<T>& g, Activation activation) {
  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb, n_stride = g.layout == Layout::TN ? g.ldb : 1;
  torch::stable::parallel_for(0, g.m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        float sum = static_cast<float>(g.bias[j]);
        for (int64_t k = 0; k < g.k; ++k)
          sum += static_cast<float>(g.a[i * g.lda + k]) * static_cast<float>(g.b[k * k_stride + j * n_stride]);
        g.c[i * g.ldc + j] = static_cast<T>(activation(sum));
      }
  });
}

}  // namespace minfer
