// Which tile hgemm's v18_fitted, and kernels like it, take for a product. A model of the time decides. It counts waves of
// tiles, steps of a tile, and bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace minfer {

// A tile's size, how many blocks share an operand of it, and the fitted ratio of a step's cycles to those at the tensor cores'
// full rate: where the tiles of these blocks lie one below the other, and where they lie side by side.
struct FittedTile {
  int rows, cols, sharing;
  double below, beside;
};

// Two lists: tiles for 129 rows or more, for kernels that would take long to compile with all tiles; and all tiles.
#define MINFER_TILES_OF_MANY_ROWS(F) \
  F(112, 64, 1, 1.05, 1.05) F(160, 64, 1, 0.98, 0.98) F(96, 128, 2, 0.89, 0.99) F(112, 128, 2, 0.92, 0.99) \
  F(128, 128, 2, 0.94, 0.99) F(144, 128, 2, 0.98, 1.01) F(160, 128, 2, 1.00, 1.03) F(176, 128, 2, 1.02, 1.04) \
  F(192, 128, 2, 1.02, 1.04) F(208, 128, 2, 1.04, 1.06) F(80, 192, 2, 0.96, 1.06) F(112, 192, 2, 1.04, 1.03) \
  F(128, 192, 2, 1.03, 1.03) F(144, 192, 2, 1.05, 1.05) F(160, 192, 2, 1.07, 1.08) F(192, 192, 2, 1.09, 1.08) \
  F(112, 256, 2, 1.10, 1.09) F(128, 256, 2, 1.09, 1.08) F(144, 256, 2, 1.11, 1.10) F(160, 256, 2, 1.10, 1.09)
#define MINFER_FITTED_TILES(F) \
  MINFER_TILES_OF_MANY_ROWS(F) F(64, 64, 1, 1.34, 1.34) F(80, 64, 1, 1.17, 1.17) F(96, 64, 1, 1.10, 1.10) \
  F(64, 64, 2, 1.05, 1.41) F(128, 64, 2, 0.33, 0.99) F(64, 128, 1, 1.31, 1.31) F(80, 128, 2, 0.88, 1.08) \
  F(104, 128, 2, 0.92, 1.03) F(64, 192, 2, 0.99, 1.14) F(176, 192, 2, 1.09, 1.08)

#define MINFER_FITTED_TILE(...) {__VA_ARGS__},
constexpr FittedTile kTilesOfManyRows[] = {MINFER_TILES_OF_MANY_ROWS(MINFER_FITTED_TILE)};
constexpr FittedTile kFittedTiles[] = {MINFER_FITTED_TILES(MINFER_FITTED_TILE)};
#undef MINFER_FITTED_TILE

// A tile, the number of parts into which k is divided, and whether the tiles of a group of blocks are side by side. A group is
// the `sharing` blocks that share an operand. A cluster has one group for each part of k.
struct FittedChoice {
  FittedTile tile{};
  int parts = 0;
  bool beside = false;
  double us = INFINITY;  // the time that the model expects

  bool takes(int rows, int cols, int sharing) const {
    return tile.rows == rows && tile.cols == cols && tile.sharing == sharing;
  }
};

inline double square(double x) { return x * x; }
inline double cube(double x) { return x * x * x; }

// The time in microseconds, if `clusters` run at once; the tiles of a group count as one in `tiles`. Fitted to 64,000 cold
// timings of 913 random products of 24 models, with 33 to 4096 rows, on an H200, in bfloat16 and both layouts.
inline double fitted_us(const FittedTile& tile, int parts, bool beside, int64_t tiles, int clusters, int m, int64_t n, int k,
                        bool tn) {
  const int64_t waves = (tiles + clusters - 1) / clusters, steps = ((k + 63) / 64 + parts - 1) / parts;
  const double high = tile.rows, wide = tile.cols, area = high * wide, idle = 1 - std::min(1.0, double(tiles) / clusters);
  // A step has 64 multiply-adds for each element; a multiprocessor does 2048 of them in a cycle. Its operands arrive meanwhile.
  const double products = area / 32 * (beside ? tile.beside : tile.below), arrive = (high + wide) * 128 / 104.6;
  const double step = (std::sqrt(std::sqrt(square(square(products)) + square(square(arrive)))) + 76.6) * (tn ? 1 : 0.988) *
                      (1 - (tile.sharing == 1 ? 0.224 : 0.047) * idle);
  const double body = waves * (steps * step + 959 + area * 0.0472) / 1755;
  const double shared = beside ? high / tile.sharing + wide : high + wide / tile.sharing;
  const double of_l2 = double(tiles) * tile.sharing * parts * steps * 128 * shared / 14.2e6;
  const double memory = 2.0 * (double(m) * k + double(n) * k + double(m) * n) / 4.05e6 + 5.9;
  const double sums = parts == 1 ? 0 : area * (parts == 2 ? 1.456e-4 : 1.752e-4) - 0.4;  // of parts, added up
  return 4.04 + std::cbrt(cube(body) + cube(of_l2) + cube(memory)) + sums;
}

// The choice among these tiles for a product. `at_once` is how many clusters of 1, 2, 4 and 8 blocks run at once on the device.
template <int kTiles>
FittedChoice choose_fitted(const FittedTile (&of)[kTiles], int m, int64_t n, int k, bool tn, const std::array<int, 4>& at_once) {
  FittedChoice best;
  for (const FittedTile& tile : of)
    for (const bool beside : {false, true}) {
      if (beside && tile.sharing == 1) break;
      const int64_t high = beside ? tile.rows : tile.sharing * tile.rows, wide = beside ? tile.sharing * tile.cols : tile.cols;
      const int64_t tiles = ((m + high - 1) / high) * ((n + wide - 1) / wide);
      for (int halvings = 0; halvings < 3; ++halvings) {
        const int parts = 1 << halvings, found = at_once[halvings + tile.sharing - 1];
        const int clusters = parts > 1 ? found : std::max(1, found);
        if (parts > 1 && (tiles > clusters || k < parts * 256)) break;  // all parts of all tiles have to run at once
        const double us = fitted_us(tile, parts, beside, tiles, clusters, m, n, k, tn);
        if (us < best.us) best = {tile, parts, beside, us};
      }
    }
  return best;
}

// The same, remembered: a choice takes some microseconds of the host's time, and a model's products come again and again.
template <int kTiles>
FittedChoice remembered_choice(const FittedTile (&of)[kTiles], int m, int64_t n, int k, bool tn,
                               const std::array<int, 4>& at_once) {
  struct Product {
    int m;
    int64_t n;
    int k;
    std::array<int, 4> at_once;

    bool operator==(const Product&) const = default;
  };
  struct Known {
    Product product{-1, 0, 0, {}};
    FittedChoice choice;
  };
  thread_local std::array<std::array<Known, 64>, 2> all;  // of both layouts
  const Product product{m, n, k, at_once};
  Known& known = all[tn][(uint64_t(m) * 31 + uint64_t(n) / 8 * 7 + uint64_t(k) / 8) % 64];
  if (known.product != product) known = {product, choose_fitted(of, m, n, k, tn, at_once)};
  return known.choice;
}

}  // namespace minfer
