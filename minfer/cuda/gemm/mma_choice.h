// Which tile hgemm's v23_mma_fitted takes for a product, and into how many parts it divides k. A model of the time decides. It
// counts waves of blocks, multiply-adds, bytes from memory and from the L2, and the latency of copies, with the rates of the GPU
// at hand. The latency, and the rates of an H200, were fitted to cold times of v07_tuned, v16_skinny and v23_mma_fitted at 3,213
// random products on an H200 (benchmarks/kernel_times.py). When v23 was timed there, its model had no latency.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace minfer {

// A tile: rows and columns of the product; `deep`: elements of k in a stage; stages in shared memory; rows and columns of a
// warp.
struct MmaTile {
  int rows, cols, deep, stages, warp_rows, warp_cols;

  constexpr int threads() const { return rows / warp_rows * (cols / warp_cols) * 32; }
  constexpr int bytes() const { return stages * (rows + cols) * deep * 2; }  // of shared memory
  // Blocks of an SM for whose registers the kernel is compiled (__launch_bounds__).
  constexpr int blocks_by_registers() const { return threads() > 128 ? 1 : rows * cols / threads() >= 64 ? 2 : 4; }
  // How many blocks run at once on an SM with so many bytes of shared memory. A block has 1 KB more than it asks for. (More may
  // run if the compiler needs fewer registers.)
  constexpr int blocks_on_sm(int shared) const {
    return std::max(1, std::min(blocks_by_registers(), shared / (bytes() + 1024)));
  }
};

// On an SM with 100 KB, two blocks fit of each tile up to 128 x 128: one multiplies while the other waits or stores. Larger
// tiles read fewer bytes from the L2 for each product.
#define MINFER_MMA_TILES(F) \
  F(16, 64, 64, 4, 16, 16) F(32, 64, 64, 4, 32, 16) F(64, 64, 64, 3, 32, 32) F(48, 128, 32, 4, 48, 32) \
  F(64, 128, 32, 4, 32, 64) F(80, 128, 32, 3, 80, 32) F(96, 128, 32, 3, 48, 64) F(112, 128, 32, 3, 112, 32) \
  F(128, 128, 32, 3, 64, 64) F(192, 128, 32, 4, 48, 64) F(128, 256, 32, 4, 64, 64) F(256, 128, 32, 4, 64, 64)

#define MINFER_MMA_TILE(...) {__VA_ARGS__},
inline constexpr MmaTile kMmaTiles[] = {MINFER_MMA_TILES(MINFER_MMA_TILE)};
#undef MINFER_MMA_TILE

// What the model knows of a GPU. The last two are what CUDA reports, or a guess where it reports 0.
struct MmaDevice {
  int arch, sms, shared;        // 80 for sm_80; multiprocessors; bytes of shared memory of one
  double bytes_per_us, cycles_per_us;  // of memory; of a multiprocessor

  // Multiply-adds a cycle of an SM, by mma.sync in half precision with fp32 sums. Of an A100 and an L40S by NVIDIA's white
  // papers, of an H200 as fitted. Of others as of an L40S, which is a guess: a GeForce of sm_86 or sm_89 has half.
  double multiply_adds() const { return arch == 80 ? 1024 : arch == 90 ? 1075 : 512; }
  // Bytes a cycle from the L2, for each SM while all read. Of an A100 by its white paper, of an H200 as fitted, of others a
  // guess.
  double l2_bytes() const { return arch == 80 ? 47 : arch == 90 ? 31 : 14; }
};

struct MmaChoice {
  MmaTile tile;
  int parts;  // of k
  double us;
};

constexpr int kMostParts = 16;
constexpr int kLeastStages = 4;  // of a part on average: the last one may be shorter

// The longer of two times that overlap; if they are about equal, somewhat more than either.
inline double longer(double one, double other) {
  const double ratio = std::min(one, other) / std::max(one, other);
  return std::max(one, other) * std::sqrt(std::sqrt(1 + ratio * ratio * ratio * ratio));
}

// The time in microseconds.
inline double mma_us(const MmaDevice& gpu, const MmaTile& tile, int parts, int64_t m, int64_t n, int64_t k) {
  constexpr double kLaunch = 5;         // microseconds
  constexpr double kFill = 1500;        // cycles of a wave before its first product
  constexpr double kStage = 40;         // cycles that a stage takes besides: its barrier
  constexpr double kLatency = 1500;     // cycles from a copy's start to its end, of an H200 under load
  constexpr double kMostOfL2 = 64;      // bytes a cycle that a single SM can take from the L2
  constexpr double kMeet = 2500;        // cycles until the last part knows that it is the last
  constexpr double kOfMemory = 0.85;    // share of the memory's rate
  const double area = double(tile.rows) * tile.cols, operands = 2.0 * (tile.rows + tile.cols) * tile.deep;
  const int64_t tiles = (m + tile.rows - 1) / tile.rows * ((n + tile.cols - 1) / tile.cols), blocks = tiles * parts;
  const int64_t stages = ((k + tile.deep - 1) / tile.deep + parts - 1) / parts;
  // Cycles of a wave: `on_sm` blocks on each of `busy` SMs.
  const auto wave = [&](int64_t on_sm, int64_t busy) {
    const double arrive = operands * on_sm / std::min(kMostOfL2, gpu.l2_bytes() * gpu.sms / busy);
    const double busiest = longer(area * tile.deep / gpu.multiply_adds() * on_sm, arrive);
    const double copies = kLatency / (tile.stages - 1);  // the copy of a stage starts so many stages before its products
    const double stage = longer(busiest, copies) + kStage / on_sm;
    return stages * stage + kFill + 4 * area * on_sm / kMostOfL2;  // and 4 bytes of each sum are written
  };
  const int64_t on_sm = tile.blocks_on_sm(gpu.shared), at_once = on_sm * gpu.sms, rest = blocks % at_once;
  double cycles = double(blocks / at_once) * wave(on_sm, gpu.sms);
  if (rest > 0) cycles += wave((rest + gpu.sms - 1) / gpu.sms, std::min<int64_t>(rest, gpu.sms));
  if (parts > 1) cycles += kMeet + 4 * area * (parts + 1) / kMostOfL2;
  const double memory = 2.0 * (m * k + n * k + m * n) / (kOfMemory * gpu.bytes_per_us);
  return kLaunch + longer(cycles / gpu.cycles_per_us, memory);
}

// The tile and the number of parts with the least time. k is divided only if there are at most `most_tiles` tiles.
inline MmaChoice choose_mma(const MmaDevice& gpu, int64_t m, int64_t n, int64_t k, int64_t most_tiles) {
  MmaChoice best{kMmaTiles[0], 1, INFINITY};
  for (const MmaTile& tile : kMmaTiles) {
    const int64_t tiles = (m + tile.rows - 1) / tile.rows * ((n + tile.cols - 1) / tile.cols);
    const int64_t stages = (k + tile.deep - 1) / tile.deep;
    for (int parts = 1; parts <= kMostParts; ++parts) {
      if (parts > 1 && (tiles > most_tiles || stages < kLeastStages * parts)) break;
      if (parts > 1 && tiles * parts > 2 * int64_t(gpu.sms) * tile.blocks_on_sm(gpu.shared)) break;
      const double us = mma_us(gpu, tile, parts, m, n, k);
      if (us < best.us) best = {tile, parts, us};
    }
  }
  return best;
}

}  // namespace minfer
