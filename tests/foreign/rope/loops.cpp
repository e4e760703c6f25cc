// loops: a token's angles once, and then all of its heads.
#include <cmath>
#include <vector>

#include "ops/op.h"

using minfer::Tensor;

template <typename T>
void rotate(T* x, int64_t heads, const std::vector<float>& cosine, const std::vector<float>& sine) {
  const size_t half = cosine.size();
  for (int64_t head = 0; head < heads; ++head, x += 2 * half) {
    for (size_t i = 0; i < half; ++i) {
      const float first = static_cast<float>(x[i]), second = static_cast<float>(x[i + half]);
      x[i] = static_cast<T>(first * cosine[i] - second * sine[i]);
      x[i + half] = static_cast<T>(first * sine[i] + second * cosine[i]);
    }
  }
}

static void foreign_rope_loops(Tensor q, Tensor k, const Tensor positions) {
  minfer::check_contiguous(q, "rope: q");
  minfer::check_contiguous(k, "rope: k");
  const int64_t tokens = q.size(0), dim = q.size(2);
  minfer::check_sizes(k, "rope: k", {tokens, k.size(1), dim});
  minfer::check_sizes(positions, "rope: positions", {tokens});
  const int32_t* at = minfer::input<int32_t>(positions, "rope: positions");
  std::vector<float> cosine(dim / 2), sine(dim / 2);
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(q.scalar_type(), "rope: q", [&]<typename T>() {
    T* q_data = minfer::output<T>(q, "rope: q");
    T* k_data = minfer::output<T>(k, "rope: k");
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t i = 0; i < dim / 2; ++i) {
        const float angle = static_cast<float>(at[token]) * static_cast<float>(std::pow(10000.0, -2.0 * i / dim));
        cosine[i] = std::cos(angle), sine[i] = std::sin(angle);
      }
      rotate(q_data + token * q.size(1) * dim, q.size(1), cosine, sine);
      rotate(k_data + token * k.size(1) * dim, k.size(1), cosine, sine);
    }
  });
}

MINFER_OP(foreign_rope_loops, "(Tensor(a!) q, Tensor(b!) k, Tensor positions) -> ()")
