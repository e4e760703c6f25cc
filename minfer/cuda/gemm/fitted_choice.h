// Which tile hgemm's v18_fitted, and kernels like it, take for a product. A model of the time decides. It counts waves of
// tiles, steps of a tile, and bytes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MINFER_BOTH __host__ __device__
#else
#define MINFER_BOTH
#endif

namespace minfer {

// A tile's size, how many blocks share an operand of it, and the fitted ratio of a step's cycles to those at the tensor cores'
// full rate: where these blocks lie one below the other (four of them: two by two), and where they lie side by side.
struct FittedTile {
  int rows, cols, sharing;
  double below, beside;
};

// Blocks that share operands: `across` blocks side by side share rows of A, and `down` blocks below each other columns of B.
struct Group {
  int across, down;

  // How many blocks copy to a block, with itself: of 2 x 2 blocks three, all but the one diagonally opposite.
  MINFER_BOTH int mates() const { return across + down - 1; }
};

// If `beside`, a row of `sharing` blocks; else a column of them, but 2 x 2 if they are four.
MINFER_BOTH constexpr Group group_of(int sharing, bool beside) {
  return beside ? Group{sharing, 1} : sharing == 4 ? Group{2, 2} : Group{1, sharing};
}

// Two lists: tiles for 129 rows or more, for kernels that would take long to compile with all tiles; and all tiles.
#define MINFER_TILES_OF_MANY_ROWS(F) \
  F(72, 64, 1, 1.33, 1.33) F(128, 64, 2, 0.72, 1.04) F(64, 128, 1, 1.35, 1.35) F(80, 128, 2, 0.91, 1.06) \
  F(96, 128, 2, 0.88, 0.99) F(112, 128, 2, 0.92, 0.99) F(136, 128, 2, 0.98, 1.00) F(144, 128, 2, 0.99, 1.00) \
  F(152, 128, 2, 1.00, 1.01) F(176, 128, 2, 1.03, 1.03) F(184, 128, 2, 1.03, 1.03) F(120, 128, 4, 0.96, 0.95) \
  F(72, 192, 2, 0.99, 1.18) F(80, 192, 2, 0.96, 1.07) F(112, 192, 2, 1.02, 1.04) F(120, 192, 2, 1.03, 1.05) \
  F(128, 192, 2, 1.03, 1.04) F(144, 192, 2, 1.07, 1.07) F(152, 192, 2, 1.08, 1.08) F(176, 192, 2, 1.10, 1.10) \
  F(192, 192, 2, 1.10, 1.10) F(120, 256, 2, 1.10, 1.11) F(128, 256, 2, 1.10, 1.11) F(160, 256, 2, 1.13, 1.12)
#define MINFER_FITTED_TILES(F) \
  MINFER_TILES_OF_MANY_ROWS(F) F(64, 64, 1, 1.36, 1.36) F(80, 64, 1, 1.27, 1.27) F(88, 64, 1, 1.25, 1.25) \
  F(96, 64, 1, 1.19, 1.19) F(112, 64, 1, 1.14, 1.14) F(120, 64, 1, 1.12, 1.12) F(160, 64, 1, 1.06, 1.06) \
  F(96, 64, 2, 0.90, 1.18) F(112, 64, 2, 0.79, 1.11) F(152, 64, 2, 0.73, 1.05) F(128, 64, 4, 0.91, 0.85) \
  F(152, 64, 4, 0.90, 0.80) F(160, 64, 4, 0.90, 0.85) F(96, 128, 1, 1.13, 1.13) F(128, 128, 1, 1.06, 1.06) \
  F(72, 128, 2, 0.95, 1.17) F(88, 128, 2, 0.89, 1.04) F(104, 128, 2, 0.92, 1.03) F(168, 128, 2, 1.03, 1.03) \
  F(216, 128, 2, 1.07, 1.07) F(248, 128, 2, 1.10, 1.10) F(88, 128, 4, 0.93, 0.95) F(104, 128, 4, 0.92, 0.94) \
  F(64, 192, 2, 1.00, 1.14) F(88, 192, 2, 0.97, 1.09) F(96, 192, 2, 0.99, 1.04) F(104, 192, 2, 1.02, 1.05) \
  F(136, 192, 2, 1.06, 1.07) F(160, 192, 2, 1.08, 1.09) F(136, 256, 2, 1.12, 1.12) F(152, 256, 2, 1.12, 1.12) \
  F(192, 128, 2, 1.04, 1.04) F(200, 128, 2, 1.05, 1.06) F(208, 128, 2, 1.06, 1.06) F(208, 192, 2, 1.12, 1.12)

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

// The constants of `fitted_us` for all tiles. Cycles: `of_step` is added to each step, and `of_tile` to each tile.
// Microseconds: `start` of a launch, `memory_start`, and `sums_of_2` and `sums_of_4`, to add up an element of 2 or 4 parts of
// k. `arrive` is in bytes a cycle, `memory` in bytes a microsecond. `nn`: a step's time in NN, relative to TN. `idle_alone` and
// `idle_shared`: by which share a step is shorter if nearly all multiprocessors are idle, in blocks that share no operands, and
// in those that do.
struct FittedModel {
  double arrive, of_step, nn, idle_alone, idle_shared, of_tile, memory, memory_start, start, sums_of_2, sums_of_4;
};

// Of operands of 16 bits. Fitted to 64,200 cold timings of 1,213 random products of 24 models, with 33 to 4096 rows, on an
// H200, in bfloat16 and both layouts.
constexpr FittedModel kModelOf16Bits{.arrive = 105.1, .of_step = 120.4, .nn = 0.984, .idle_alone = 0.424, .idle_shared = 0.198,
                                     .of_tile = 2517, .memory = 5.044e6, .memory_start = 4.34, .start = 4.0,
                                     .sums_of_2 = 1.671e-4, .sums_of_4 = 1.905e-4};

inline double square(double x) { return x * x; }
inline double cube(double x) { return x * x * x; }
inline double fourth(double x) { return square(square(x)); }

// The time in microseconds, if `clusters` run at once; the tiles of a group count as one in `tiles`. k counts elements of
// 16 bits; for fp8 it is half of the product's k.
inline double fitted_us(const FittedModel& model, const FittedTile& tile, int parts, bool beside, int64_t tiles, int clusters,
                        int m, int64_t n, int k, bool tn) {
  const int64_t waves = (tiles + clusters - 1) / clusters, steps = ((k + 63) / 64 + parts - 1) / parts;
  const double high = tile.rows, wide = tile.cols, area = high * wide, idle = 1 - std::min(1.0, double(tiles) / clusters);
  // A step has 64 multiply-adds for each element; a multiprocessor does 2048 of them in a cycle. With fp8, both are twice as
  // many. Meanwhile the operands of a
  // later step arrive. Two multiprocessors that are neighbours get what both ask for at about the same time only once. The
  // model assumes that they run blocks of one group or, if a group is one block, tiles that lie side by side, as is mostly so
  // where all tiles run at once.
  const Group group = group_of(tile.sharing, beside);
  const double of_a = tile.sharing == 1 || group.across > 1 ? high / 2 : high, of_b = group.down > 1 ? wide / 2 : wide;
  const double products = area / 32 * (beside ? tile.beside : tile.below), arrive = (of_a + of_b) * 128 / model.arrive;
  const double longer = std::sqrt(std::sqrt(fourth(products) + fourth(arrive)));
  const double of_idle = tile.sharing == 1 ? model.idle_alone : model.idle_shared;
  const double step = (longer + model.of_step) * (tn ? 1 : model.nn) * (1 - of_idle * idle);
  const double body = waves * (steps * step + model.of_tile) / 1755;
  const double memory = 2.0 * (double(m) * k + double(n) * k + double(m) * n) / model.memory + model.memory_start;
  const double sums = parts == 1 ? 0 : area * (parts == 2 ? model.sums_of_2 : model.sums_of_4) - 0.4;  // of parts, added up
  return model.start + std::sqrt(std::sqrt(fourth(body) + fourth(memory))) + sums;
}

// The choice among these tiles for a product. `at_once` is how many clusters of 1, 2, 4 and 8 blocks run at once on the device.
template <int kTiles>
FittedChoice choose_fitted(const FittedTile (&of)[kTiles], int m, int64_t n, int k, bool tn, const std::array<int, 4>& at_once,
                           const FittedModel& model = kModelOf16Bits) {
  FittedChoice best;
  for (const FittedTile& tile : of)
    for (const bool beside : {false, true}) {
      if (beside && tile.sharing == 1) break;
      const Group group = group_of(tile.sharing, beside);
      const int64_t high = int64_t(tile.rows) * group.down, wide = int64_t(tile.cols) * group.across;
      const int64_t tiles = ((m + high - 1) / high) * ((n + wide - 1) / wide);
      for (int halvings = 0; halvings < 3 && tile.sharing << halvings <= 8; ++halvings) {
        const int parts = 1 << halvings, found = at_once[std::bit_width(unsigned(tile.sharing << halvings)) - 1];
        const int clusters = parts > 1 ? found : std::max(1, found);
        if (parts > 1 && (tiles > clusters || k < parts * 256)) break;  // all parts of all tiles have to run at once
        const double us = fitted_us(model, tile, parts, beside, tiles, clusters, m, n, k, tn);
        if (us < best.us) best = {tile, parts, beside, us};
      }
    }
  return best;
}

// The same, remembered: a choice takes some microseconds of the host's time, and a model's products come again and again.
template <int kTiles>
FittedChoice remembered_choice(const FittedTile (&of)[kTiles], int m, int64_t n, int k, bool tn,
                               const std::array<int, 4>& at_once, const FittedModel& model = kModelOf16Bits) {
  struct Product {
    const FittedTile* of;
    const FittedModel* model;
    int m;
    int64_t n;
    int k;
    std::array<int, 4> at_once;

    bool operator==(const Product&) const = default;
  };
  struct Known {
    Product product{};
    FittedChoice choice;
  };
  thread_local std::array<std::array<Known, 64>, 2> all;  // of both layouts
  const Product product{of, &model, m, n, k, at_once};
  Known& known = all[tn][(uint64_t(m) * 31 + uint64_t(n) / 8 * 7 + uint64_t(k) / 8) % 64];
  if (known.product != product) known = {product, choose_fitted(of, m, n, k, tn, at_once, model)};
  return known.choice;
}

}  // namespace minfer
