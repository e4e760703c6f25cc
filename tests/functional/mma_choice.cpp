// The model of v23_mma_fitted's times for a GPU that the caller describes: multiprocessors, bytes of shared memory of each,
// multiply-adds a cycle of each, bytes from the L2 a cycle of all, bytes of memory a microsecond, and cycles a microsecond.
#include "cuda/gemm/mma_choice.h"

namespace {

minfer::MmaDevice device(const double* of) { return {int(of[0]), int(of[1]), of[2], of[3], of[4], of[5]}; }

}  // namespace

extern "C" int minfer_mma_tiles(int* sizes) {
  int count = 0;
  for (const minfer::MmaTile& tile : minfer::kMmaTiles) sizes[count++] = tile.rows, sizes[count++] = tile.cols;
  return count / 2;
}

extern "C" double minfer_choose_mma(const double* of, int m, int n, int k, int* found) {
  const minfer::MmaChoice choice = minfer::choose_mma(device(of), m, n, k, 4096);
  found[0] = choice.tile.rows, found[1] = choice.tile.cols, found[2] = choice.parts;
  return choice.us;
}

extern "C" double minfer_mma_us(const double* of, const int* tile, int parts, int m, int n, int k) {
  return minfer::mma_us(device(of), {tile[0], tile[1], tile[2], tile[3], tile[4], tile[5]}, parts, m, n, k);
}
