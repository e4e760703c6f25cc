// See torch/csrc/stable/tensor.h.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#define STD_CUDA_CHECK(EXPR) declared_check((EXPR) == cudaSuccess)
#define STD_CUDA_KERNEL_LAUNCH_CHECK() STD_CUDA_CHECK(cudaGetLastError())
