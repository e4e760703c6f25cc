// cpu_copy: memcpy, threads over pieces of 64 K elements; a CPU's own prefetcher keeps many lines on the way.
// Idea: a copy on a CPU, for comparison. `share` means nothing here.
// Expected: the speed of memory, with one thread or a few.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/op.h"

static void ilp_cpu_copy(minfer::Tensor y, const minfer::Tensor x, int64_t share) {
  minfer::check_rank(x, "ilp: x", 1);
  minfer::check_sizes(y, "ilp: y", {x.size(0)});
  minfer::check_contiguous(x, "ilp: x");
  minfer::check_contiguous(y, "ilp: y");
  const float* from = minfer::input<float>(x, "ilp: x");
  float* to = minfer::output<float>(y, "ilp: y");
  torch::stable::parallel_for(0, x.size(0), 1 << 16, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, (end - begin) * sizeof(float));
  });
}

MINFER_OP(ilp_cpu_copy, "(Tensor(a!) y, Tensor x, int share=1) -> ()")
