// The tile that v18_fitted or, for fp8, v12_fp8_fitted takes for a product on an H100 or H200: its rows, its columns, how many
// blocks share an operand, into how many parts k is divided, and whether the tiles of a group are side by side.
#include "cuda/gemm/fp8_tiles.h"

extern "C" void minfer_choose_tile(int m, int n, int k, int tn, int fp8, int* tile) {
  using namespace minfer;
  constexpr std::array<int, 4> kAtOnce = {132, 66, 31, 15};
  const FittedChoice of = fp8 ? choose_fitted(kFp8Tiles, m, n, k / 2, true, kAtOnce, kModelOfFp8)
                              : choose_fitted(kFittedTiles, m, n, k, tn != 0, kAtOnce);
  tile[0] = of.tile.rows, tile[1] = of.tile.cols, tile[2] = of.tile.sharing, tile[3] = of.parts, tile[4] = of.beside;
}
