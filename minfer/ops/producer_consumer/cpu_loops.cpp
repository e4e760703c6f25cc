// cpu_loops: the steps for 64 elements at a time, threads over the elements.
// Idea: 64 chains that do not wait for each other fill the vector units; a CPU's prefetcher is the producer.
// Expected: 64 steps are bound by the multiply-adds, 8 by memory with several cores.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "stream.h"

namespace minfer {

constexpr int kChains = 64;

void launch(const Stream& s) {
  torch::stable::parallel_for(0, s.n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kChains) {
      const int64_t count = std::min<int64_t>(kChains, end - first);
      float values[kChains] = {};
      std::copy_n(s.x + first, count, values);
      for (int step = 0; step < s.steps; ++step)
        for (float& value : values) value = (1.0f - kRate) * value + kRate;
      std::copy_n(values, count, s.y + first);
    }
  });
}

}  // namespace minfer

MINFER_STREAM(producer_consumer_cpu_loops, minfer::launch)
