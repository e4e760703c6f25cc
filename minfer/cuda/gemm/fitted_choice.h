// Which tile hgemm's v18_fitted, and kernels like it, take for a product. A model of the time decides. It counts waves of
// tiles, steps of a tile, and bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace minfer {

// A tile's size, and the fitted ratio of a step's cycles to those at the tensor cores' full rate. Narrow tiles read more bytes
// from the L2 for each product.
struct FittedTile {
  int rows, cols;
  double rate;
};

#define MINFER_FITTED_TILES(F) \
  F(80, 128, 1.367) F(96, 128, 1.274) F(112, 128, 1.174) F(128, 128, 1.132) F(144, 128, 1.097) \
  F(160, 128, 1.086) F(176, 128, 1.091) F(200, 128, 1.084) F(208, 128, 1.067) F(224, 128, 1.114) \
  F(128, 192, 1.097) F(144, 192, 1.115) F(160, 192, 1.129) F(192, 192, 1.114) F(224, 192, 1.123) \
  F(120, 256, 1.132) F(128, 256, 1.112) F(136, 256, 1.119) F(144, 256, 1.110) F(152, 256, 1.117) \
  F(160, 256, 1.117)

#define MINFER_FITTED_TILE(ROWS, COLS, RATE) {ROWS, COLS, RATE},
constexpr FittedTile kFittedTiles[] = {MINFER_FITTED_TILES(MINFER_FITTED_TILE)};
#undef MINFER_FITTED_TILE

// A tile, the number of parts into which k is divided, and whether a pair's tiles are side by side. Each part has a
// pair of blocks, and a cluster has the pairs of all parts.
struct FittedChoice {
  int rows, cols, parts;
  bool beside;
  double us;  // the time that the model expects
};

// The time in microseconds, if `clusters` run at once. Fitted to 8,100 cold timings of 112 random products of 24
// models, with 129 rows or more, on an H100, in both layouts and dtypes. As a test, it was fitted to two thirds of
// these products, and chose a tile for each of the others among 44. Its choice was 0.2 % slower than the best tile in
// the geometric mean, and 3 % at most.
inline double fitted_us(const FittedTile& tile, int parts, bool beside, int64_t tiles, int clusters, int m, int64_t n, int k,
                        bool tn) {
  const int64_t waves = (tiles + clusters - 1) / clusters, steps = ((k + 63) / 64 + parts - 1) / parts;
  const double area = double(tile.rows) * tile.cols, busy = std::min(1.0, double(tiles) / clusters);
  // A step has 64 multiply-adds for each element; a multiprocessor does 2048 of them in a cycle.
  const double step = (area / 32 * tile.rate + 64) * (beside ? 1.020 : 1) * (tn ? 1 : 1.008) * (1 - 0.187 * (1 - busy));
  const double body = waves * (steps * step + 1445 + area * 0.1266) / 1755;
  const double bytes = 2.0 * (double(m) * k + double(n) * k + double(m) * n), memory = bytes / 4e6 + 6.3;
  return 2.98 + std::cbrt(body * body * body + memory * memory * memory) + (parts > 1 ? area * 1.043e-4 : 0);
}

// The choice among these tiles for a product. `at_once` is how many clusters of 2, 4 and 8 blocks run at once on the device.
template <int kTiles>
FittedChoice choose_fitted(const FittedTile (&of)[kTiles], int m, int64_t n, int k, bool tn, const std::array<int, 3>& at_once) {
  FittedChoice best{0, 0, 0, false, INFINITY};
  for (const FittedTile& tile : of)
    for (const bool beside : {false, true}) {
      const int64_t high = beside ? tile.rows : 2 * tile.rows, wide = beside ? 2 * tile.cols : tile.cols;
      const int64_t tiles = ((m + high - 1) / high) * ((n + wide - 1) / wide);
      for (int i = 0; i < 3; ++i) {
        const int parts = 1 << i, clusters = i > 0 ? at_once[i] : std::max(1, at_once[i]);
        if (parts > 1 && (tiles > clusters || k < parts * 256)) break;  // all parts of all tiles have to run at once
        const double us = fitted_us(tile, parts, beside, tiles, clusters, m, n, k, tn);
        if (us < best.us) best = {tile.rows, tile.cols, parts, beside, us};
      }
    }
  return best;
}

}  // namespace minfer
