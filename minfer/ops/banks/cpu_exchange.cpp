// cpu_exchange: the same rounds through a tile in memory, threads over the rows.
// Idea: a CPU's cache has no banks that a program could see.
// Expected: the stride hardly matters: a tile is 4 KB, and stays in the L1 at any.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "banks.h"

namespace minfer {

void launch(const Exchange& e) {
  torch::stable::parallel_for(0, e.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t columns = int64_t(kLanes) * e.words;
      float tile[kLanes * kMostStride], pieces[kLanes * 4];
      std::memcpy(pieces, e.x + row * columns, columns * sizeof(float));
      for (int round = 0; round < e.rounds; ++round) {
        for (int lane = 0; lane < kLanes; ++lane)
          for (int i = 0; i < e.words; ++i) tile[lane * e.stride + i] = pieces[lane * e.words + i];
        for (int lane = 0; lane < kLanes; ++lane)
          for (int i = 0; i < e.words; ++i) pieces[lane * e.words + i] = tile[(lane + kAcross) % kLanes * e.stride + i];
      }
      std::memcpy(e.y + row * columns, pieces, columns * sizeof(float));
    }
  });
}

}  // namespace minfer

MINFER_BANKS(banks_cpu_exchange, minfer::launch)
