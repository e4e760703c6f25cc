// The model of v23_mma_fitted's times for a GPU that the caller describes: the fields of MmaDevice, in its order.
#include "cuda/gemm/mma_choice.h"

namespace {

minfer::MmaDevice device(const double* of) { return {int(of[0]), int(of[1]), int(of[2]), of[3], of[4]}; }

}  // namespace

extern "C" int minfer_mma_tiles(int* sizes) {
  int count = 0;
  for (const minfer::MmaTile& tile : minfer::kMmaTiles) sizes[count++] = tile.rows, sizes[count++] = tile.cols;
  return count / 2;
}

extern "C" void minfer_choose_mma(const double* of, int m, int n, int k, int* found) {
  const minfer::MmaChoice choice = minfer::choose_mma(device(of), m, n, k, 4096);
  found[0] = choice.tile.rows, found[1] = choice.tile.cols, found[2] = choice.tile.deep, found[3] = choice.parts;
}

extern "C" double minfer_mma_us(const double* of, const int* tile, int parts, int m, int n, int k) {
  return minfer::mma_us(device(of), {tile[0], tile[1], tile[2], tile[3], tile[4], tile[5]}, parts, m, n, k);
}
