// cpu_naive: the definition in loops, threads over the rows for dx and then over the columns for dweight.
// Idea: the definition on a CPU, for comparison. Neighbouring columns are added up together, a row at a time.
// Expected: bound by the two sums of a row, in which each addition waits for the one before.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/halves.h"
#include "rmsnorm_backward.h"

namespace minfer {

constexpr int kColumns = 64;  // of a task

template <typename T>
void launch(const RmsNormBackward<T>& p) {
  std::vector<float> rstd(p.tokens);
  torch::stable::parallel_for(0, p.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      const T* dy = p.dy + row * p.dy_stride;
      T* dx = p.dx + row * p.dx_stride;
      float squares = 0.0f, products = 0.0f;
      for (int i = 0; i < p.hidden; ++i) {
        squares += widen(x[i]) * widen(x[i]);
        products += widen(dy[i]) * widen(p.weight[i]) * widen(x[i]);
      }
      const float r = p.rstd ? p.rstd[row] : 1.0f / std::sqrt(squares * p.share + p.eps);
      const float common = products * p.share * r * r;
      for (int i = 0; i < p.hidden; ++i)
        dx[i] = narrow<T>(r * (widen(dy[i]) * widen(p.weight[i]) - widen(x[i]) * common));
      rstd[row] = r;
    }
  });
  torch::stable::parallel_for(0, (p.hidden + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kColumns; first < std::min<int64_t>(p.hidden, end * kColumns); first += kColumns) {
      const int count = static_cast<int>(std::min<int64_t>(kColumns, p.hidden - first));
      float sums[kColumns] = {};
      for (int64_t row = 0; row < p.tokens; ++row) {
        const T* x = p.x + row * p.x_stride + first;
        const T* dy = p.dy + row * p.dy_stride + first;
        for (int i = 0; i < count; ++i) sums[i] += widen(dy[i]) * (widen(x[i]) * rstd[row]);
      }
      for (int i = 0; i < count; ++i) p.dweight[first + i] = narrow<T>(sums[i]);
    }
  });
}

}  // namespace minfer

MINFER_RMSNORM_BACKWARD(rmsnorm_backward_cpu_naive, minfer::launch)
