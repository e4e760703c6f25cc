// Which tile v18_fitted takes for a product. A model of the time decides: waves of tiles, steps of a tile, and bytes of memory.
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

#define MINFER_FITTED_TILES(F)                                                                                    \
  F(96, 128, 1.332) F(112, 128, 1.222) F(144, 128, 1.152) F(160, 128, 1.114) F(176, 128, 1.094) F(192, 128, 1.091)       \
  F(208, 128, 1.084) F(224, 128, 1.100) F(128, 256, 1.099) F(144, 256, 1.093) F(160, 256, 1.089) F(128, 192, 1.101)      \
  F(160, 192, 1.107) F(192, 192, 1.088) F(128, 64, 1.629) F(160, 64, 1.428)

#define MINFER_FITTED_TILE(ROWS, COLS, RATE) {ROWS, COLS, RATE},
constexpr FittedTile kFittedTiles[] = {MINFER_FITTED_TILES(MINFER_FITTED_TILE)};
#undef MINFER_FITTED_TILE

// A tile, into how many parts k is divided, and whether a pair's tiles are side by side. Each part has a pair of blocks. A
// cluster has the pairs of all parts.
struct FittedChoice {
  int rows, cols, parts;
  bool beside;
  double us;  // that the model expects
};

// The time in microseconds, if `clusters` run at once. Fitted to 4,600 cold timings of 201 random products of 24 models on an
// H100, in both layouts and dtypes. To test it, it was fitted to two thirds of these products: for the others, the tile that it
// chose was 1.2 % slower than the best one in the geometric mean, and 8 % at most.
inline double fitted_us(const FittedTile& tile, int parts, bool beside, int64_t tiles, int clusters, int m, int n, int k,
                        bool tn) {
  const int64_t waves = (tiles + clusters - 1) / clusters, steps = ((k + 63) / 64 + parts - 1) / parts;
  const double area = double(tile.rows) * tile.cols, busy = std::min(1.0, double(tiles) / clusters);
  // A step has 64 multiply-adds for each element; a multiprocessor does 2048 of them in a cycle.
  const double step = (area / 32 * tile.rate + 62) * (beside ? 1.024 : 1) * (tn ? 1 : 0.987) * (1 - 0.198 * (1 - busy));
  const double body = waves * (steps * step + 5578 + area * 0.0148) / 1755;
  const double bytes = 2.0 * (double(m) * k + double(n) * k + double(m) * n), memory = bytes / 2.764e6 + 5.58;
  return 3.43 + std::cbrt(body * body * body + memory * memory * memory) + (parts > 1 ? 1.09 + area * 1.346e-4 : 0);
}

// The choice for a product. `at_once` is how many clusters of 2, 4 and 8 blocks run at once on the device.
inline FittedChoice choose_fitted(int m, int n, int k, bool tn, const std::array<int, 3>& at_once) {
  FittedChoice best{0, 0, 0, false, INFINITY};
  for (const FittedTile& tile : kFittedTiles)
    for (const bool beside : {false, true}) {
      const int64_t high = beside ? tile.rows : 2 * tile.rows, wide = beside ? 2 * tile.cols : tile.cols;
      const int64_t tiles = ((m + high - 1) / high) * ((n + wide - 1) / wide);
      for (int i = 0; i < 3; ++i) {
        const int parts = 1 << i, clusters = std::max(1, at_once[i]);
        if (parts > 1 && (tiles > clusters || k < parts * 256)) break;  // only where all parts of all tiles run at once
        const double us = fitted_us(tile, parts, beside, tiles, clusters, m, n, k, tn);
        if (us < best.us) best = {tile.rows, tile.cols, parts, beside, us};
      }
    }
  return best;
}

}  // namespace minfer
