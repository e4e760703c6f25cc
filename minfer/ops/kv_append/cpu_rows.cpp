// cpu_rows: a memcpy a row, or a loop that quantises it; threads over the tokens.
// Idea: the definition on a CPU, for comparison.
// Expected: the speed of memory with a few cores; with fp8 the conversion's, about 2 ns an element and core.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kv_append.h"

namespace minfer {

template <typename T, typename Cache>
void write(Cache* to, const T* from, int width, float factor) {
  if constexpr (std::is_same_v<Cache, T>) {
    std::memcpy(to, from, width * sizeof(T));
  } else {
    for (int i = 0; i < width; ++i) {
      const float value = static_cast<float>(from[i]) * factor;
      const float kept = std::isnan(value) ? value : std::clamp(value, -448.0f, 448.0f);
      to[i] = static_cast<Cache>(torch::headeronly::Float8_e4m3fn(kept).x);
    }
  }
}

template <typename T, typename Cache>
void launch(const Append<T, Cache>& p) {
  const int64_t rows = 1 + 8192 / p.width;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = p.place(static_cast<int>(token));
      for (int which = 0; place >= 0 && which < 2; ++which)
        write(p.cache[which] + place * p.width, p.rows[which] + token * p.stride[which], p.width,
              p.scales ? 1.0f / p.scales[which] : 1.0f);
    }
  });
}

}  // namespace minfer

MINFER_KV_APPEND(kv_append_cpu_rows, minfer::launch)
