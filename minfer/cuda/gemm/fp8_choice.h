// Which tile quant_gemm's v12_fp8_even_tiles takes for a product with fp8, by a model of the time. The form of the model is that
// of fitted_choice.h.
#pragma once

#include "cuda/gemm/fitted_choice.h"

namespace minfer {

// A tile has `cols` columns. The rows are divided evenly among as few tiles of up to 128 rows as possible. `sharing` blocks below
// each other share their copies of W.
struct Fp8Tile {
  int cols = 0, sharing = 1;
  double us = INFINITY;  // the time that the model expects
};

constexpr int kFp8Rows = 128, kFp8Waves = 4;  // the model was fitted to at most so many waves
#define MINFER_FP8_TILES(F) F(64, 1) F(112, 1) F(192, 1) F(96, 2) F(128, 2) F(160, 2) F(192, 2)

// The time in microseconds for x (m, k) and W (n, k), on `sms` multiprocessors. Fitted to 603 cold timings on an H200, of 122
// products of random layers of 24 language models with 129 to 1100 rows, which nearly filled tiles of 128 rows. The root mean
// square of the errors is 3.7 %.
inline double fp8_tile_us(const Fp8Tile& tile, int m, int64_t n, int k, int sms) {
  const int64_t high = int64_t(kFp8Rows) * tile.sharing, down = (m + high - 1) / high * tile.sharing;
  const int64_t blocks = down * ((n + tile.cols - 1) / tile.cols), steps = (k + 127) / 128, waves = (blocks + sms - 1) / sms;
  if (waves > kFp8Waves) return INFINITY;
  const double rows = (m + down * 16 - 1) / (down * 16) * 16.0, area = double(kFp8Rows) * tile.cols;
  const double idle = 1 - std::min(1.0, double(blocks) / sms);
  const double step = area / 32 * 1.084 * (1 - 0.0276 * idle) + 8 + 42 * (tile.sharing - 1);
  const double body = waves * (steps * step + 3573 + area * 0.1651) / 1755;
  const double memory = (double(m) * k + double(n) * k + 2.0 * m * n) / 4.4e6 + 2.38;
  const double of_l2 = blocks * steps * 128 * (rows + double(tile.cols) / tile.sharing) / 12.37e6;
  return 3.89 + std::cbrt(cube(body) + cube(memory) + cube(of_l2));
}

inline Fp8Tile choose_fp8_tile(int m, int64_t n, int k, int sms) {
  Fp8Tile best;
#define MINFER_TRY(COLS, SHARING)                       \
  if (Fp8Tile tile{COLS, SHARING}; true)                \
    if (tile.us = fp8_tile_us(tile, m, n, k, sms); tile.us < best.us) best = tile;
  MINFER_FP8_TILES(MINFER_TRY)
#undef MINFER_TRY
  return best;
}

}  // namespace minfer
