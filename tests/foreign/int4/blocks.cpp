// blocks: a block's products are added up before its scale multiplies them.
#include "ops/op.h"

using minfer::Tensor;

constexpr int64_t kBlock = 32;

static void foreign_int4_blocks(Tensor y, const Tensor x, const Tensor w, const Tensor scales) {
  const int64_t m = x.size(0), k = x.size(1), n = w.size(0);
  minfer::check_sizes(y, "int4: y", {m, n});
  minfer::check_sizes(w, "int4: w", {n, k / 2});
  minfer::check_sizes(scales, "int4: scales", {n, k / kBlock});
  minfer::check_contiguous(y, "int4: y");
  minfer::check_contiguous(x, "int4: x");
  minfer::check_contiguous(w, "int4: w");
  minfer::check_contiguous(scales, "int4: scales");
  const uint8_t* bytes = minfer::input<uint8_t>(w, "int4: w");
  const float* scale = minfer::input<float>(scales, "int4: scales");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(x.scalar_type(), "int4: x", [&]<typename T>() {
    T* to = minfer::output<T>(y, "int4: y");
    const T* from = minfer::input<T>(x, "int4: x");
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        float sum = 0;
        for (int64_t block = 0; block < k / kBlock; ++block) {
          float part = 0;
          for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += 2) {
            const int packed = bytes[(column * k + i) / 2];
            part += static_cast<float>(from[row * k + i]) * static_cast<float>((packed & 15) - 8);
            part += static_cast<float>(from[row * k + i + 1]) * static_cast<float>((packed >> 4) - 8);
          }
          sum += part * scale[column * (k / kBlock) + block];
        }
        to[row * n + column] = static_cast<T>(sum);
      }
    }
  });
}

MINFER_OP(foreign_int4_blocks, "(Tensor(a!) y, Tensor x, Tensor w, Tensor scales) -> ()")
