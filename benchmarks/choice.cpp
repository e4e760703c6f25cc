// The tile that v18_fitted takes for a product on an H100 or H200: its rows, its columns, how many blocks share an operand, into
// how many parts k is divided, and whether the tiles of a group are side by side.
#include "cuda/gemm/fitted_choice.h"

extern "C" void minfer_choose_tile(int m, int n, int k, int tn, int* tile) {
  const minfer::FittedChoice of = minfer::choose_fitted(minfer::kFittedTiles, m, n, k, tn != 0, {132, 66, 31, 15});
  tile[0] = of.tile.rows, tile[1] = of.tile.cols, tile[2] = of.tile.sharing, tile[3] = of.parts, tile[4] = of.beside;
}
