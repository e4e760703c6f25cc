// Which tile hgemm's v23_mma_fitted takes for a product, and into how many parts it divides k. A model of the time decides. It
// counts waves of blocks, multiply-adds, and bytes from memory and from the L2, with the rates of the GPU at hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace minfer {

// A tile: its rows and columns of the product; steps in k of a stage in shared memory, and stages; rows and columns of a warp.
struct MmaTile {
  int rows, cols, deep, stages, warp_rows, warp_cols;

  constexpr int threads() const { return rows / warp_rows * (cols / warp_cols) * 32; }
  constexpr int bytes() const { return stages * (rows + cols) * deep * 2; }  // of shared memory
  // How many blocks the registers of an SM are for.
  constexpr int blocks_by_registers() const { return threads() > 128 ? 1 : rows * cols / threads() >= 64 ? 2 : 4; }
  // How many blocks run at once on an SM with so many bytes of shared memory. A block has 1 KB more than it asks for.
  constexpr int blocks_on_sm(int shared) const {
    return std::max(1, std::min(blocks_by_registers(), shared / (bytes() + 1024)));
  }
};

// Those of up to 128 columns leave room for a second block on an SM with 100 KB, so that one block multiplies while the other
// one waits or stores. Those of more elements read the L2 less.
#define MINFER_MMA_TILES(F) \
  F(16, 64, 64, 4, 16, 16) F(32, 64, 64, 4, 32, 16) F(64, 64, 64, 3, 32, 32) F(48, 128, 32, 4, 48, 32) \
  F(64, 128, 32, 4, 32, 64) F(80, 128, 32, 3, 80, 32) F(96, 128, 32, 3, 48, 64) F(112, 128, 32, 3, 112, 32) \
  F(128, 128, 32, 3, 64, 64) F(192, 128, 32, 4, 48, 64) F(128, 256, 32, 4, 64, 64) F(256, 128, 32, 4, 64, 64)

#define MINFER_MMA_TILE(...) {__VA_ARGS__},
inline constexpr MmaTile kMmaTiles[] = {MINFER_MMA_TILES(MINFER_MMA_TILE)};
#undef MINFER_MMA_TILE

// What the model knows of a GPU.
struct MmaDevice {
  int sms, shared;        // multiprocessors; bytes of shared memory of one
  double multiply_adds;   // of mma.sync in half precision with fp32 sums, a cycle of an SM
  double l2_bytes;        // from the L2 to all SMs, a cycle
  double memory_bytes;    // a microsecond
  double cycles;          // a microsecond
};

struct MmaChoice {
  MmaTile tile;
  int parts;  // of k
  double us;
};

constexpr int kMostParts = 16;
constexpr int kLeastSteps = 4;  // stages of k that a part has at least

// The longer of two times that overlap; if they are about equal, somewhat more than either.
inline double longer(double one, double other) {
  const double ratio = std::min(one, other) / std::max(one, other);
  return std::max(one, other) * std::sqrt(std::sqrt(1 + ratio * ratio * ratio * ratio));
}

// The time in microseconds.
inline double mma_us(const MmaDevice& gpu, const MmaTile& tile, int parts, int64_t m, int64_t n, int64_t k) {
  constexpr double kLaunch = 5, kFill = 1500, kStep = 40, kMostOfL2 = 64, kArrive = 2500, kOfMemory = 0.85;
  const int64_t tiles = (m + tile.rows - 1) / tile.rows * ((n + tile.cols - 1) / tile.cols), blocks = tiles * parts;
  const int64_t steps = ((k + tile.deep - 1) / tile.deep + parts - 1) / parts;
  const double products = double(tile.rows) * tile.cols * tile.deep / gpu.multiply_adds;
  const double operands = 2.0 * (tile.rows + tile.cols) * tile.deep;
  // So many blocks on each of `busy` multiprocessors, from the first copy to the last store.
  const auto wave = [&](int64_t on_sm, int64_t busy) {
    const double arrive = operands * on_sm / std::min(kMostOfL2, gpu.l2_bytes / busy), multiply = products * on_sm;
    const double step = longer(multiply, arrive) + kStep / on_sm;
    return steps * step + kFill + 4.0 * tile.rows * tile.cols * on_sm / kMostOfL2;
  };
  const int64_t on_sm = tile.blocks_on_sm(gpu.shared), at_once = on_sm * gpu.sms, rest = blocks % at_once;
  double cycles = double(blocks / at_once) * wave(on_sm, gpu.sms);
  if (rest > 0) cycles += wave((rest + gpu.sms - 1) / gpu.sms, std::min<int64_t>(rest, gpu.sms));
  if (parts > 1) cycles += kArrive + 4.0 * tile.rows * tile.cols * (parts + 1) / kMostOfL2;
  const double body = cycles / gpu.cycles, memory = 2.0 * (m * k + n * k + m * n) / (kOfMemory * gpu.memory_bytes);
  return kLaunch + longer(body, memory);
}

// The tile and the number of parts with the least time. `most_tiles` may be divided at most.
inline MmaChoice choose_mma(const MmaDevice& gpu, int64_t m, int64_t n, int64_t k, int64_t most_tiles) {
  MmaChoice best{kMmaTiles[0], 1, INFINITY};
  for (const MmaTile& tile : kMmaTiles) {
    const int64_t tiles = (m + tile.rows - 1) / tile.rows * ((n + tile.cols - 1) / tile.cols);
    const int64_t steps = (k + tile.deep - 1) / tile.deep;
    for (int parts = 1; parts <= kMostParts; ++parts) {
      if (parts > 1 && (tiles > most_tiles || steps < kLeastSteps * parts)) break;
      if (parts > 1 && tiles * parts > 2 * int64_t(gpu.sms) * tile.blocks_on_sm(gpu.shared)) break;
      const double us = mma_us(gpu, tile, parts, m, n, k);
      if (us < best.us) best = {tile, parts, us};
    }
  }
  return best;
}

}  // namespace minfer
