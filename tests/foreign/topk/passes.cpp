// passes: a pass over the row for each of the k, which finds what comes next by value, and by index among equal values.
#include "ops/op.h"

using minfer::Tensor;

template <typename T>
void select(const T* x, int64_t n, int64_t k, T* values, int32_t* indices) {
  float last = 0;
  int64_t last_at = -1;
  for (int64_t rank = 0; rank < k; ++rank) {
    float best = 0;
    int64_t at = -1;
    for (int64_t i = 0; i < n; ++i) {
      const float value = static_cast<float>(x[i]);
      const bool left = last_at < 0 || value < last || (value == last && i > last_at);
      if (left && (at < 0 || value > best)) best = value, at = i;
    }
    values[rank] = x[at], indices[rank] = static_cast<int32_t>(at);
    last = best, last_at = at;
  }
}

static void foreign_topk_passes(Tensor values, Tensor indices, const Tensor x) {
  const int64_t rows = x.size(0), n = x.size(1), k = values.size(1);
  minfer::check_sizes(values, "topk: values", {rows, k});
  minfer::check_sizes(indices, "topk: indices", {rows, k});
  minfer::check_contiguous(values, "topk: values");
  minfer::check_contiguous(indices, "topk: indices");
  minfer::check_contiguous(x, "topk: x");
  int32_t* at = minfer::output<int32_t>(indices, "topk: indices");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(x.scalar_type(), "topk: x", [&]<typename T>() {
    T* found = minfer::output<T>(values, "topk: values");
    const T* data = minfer::input<T>(x, "topk: x");
    for (int64_t row = 0; row < rows; ++row) select(data + row * n, n, k, found + row * k, at + row * k);
  });
}

MINFER_OP(foreign_topk_passes, "(Tensor(a!) values, Tensor(b!) indices, Tensor x) -> ()")
