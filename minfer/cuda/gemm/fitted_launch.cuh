// Launches the tile that the model chooses for a product.
#pragma once

#include "cuda/gemm/fitted.cuh"
#include "cuda/gemm/fitted_choice.h"

namespace minfer {

// How many clusters of 1, 2, 4 and 8 blocks run at once. One kind of tile stands for all: a block of any of them fills an SM.
template <typename Any, typename Finish>
std::array<int, 4> fitted_at_once() {
  const auto any = multiply<Any, Finish>;
  allow_shared(any, Any::kBytes);
  std::array<int, 4> at_once{};
  for (int i = 0; i < 4; ++i) STD_CUDA_CHECK(clusters_at_once(&at_once[i], any, 1 << i, Any::kThreads, Any::kBytes));
  return at_once;
}

#define MINFER_LAUNCH_IF(ROWS, COLS, SHARING, ...) \
  if (choice.takes(ROWS, COLS, SHARING))           \
    return launch_fitted<ROWS, COLS, kLayout, false, Finish, SHARING>(g, choice.parts, choice.beside);

template <Layout kLayout, typename Finish, typename Problem>
void launch_fitting(const Problem& g) {
  const auto at_once = fitted_at_once<Fitted<Problem, kLayout, 144, 128>, Finish>();
  const FittedChoice choice = remembered_choice(kFittedTiles, g.m, g.n, g.k, kLayout == Layout::TN, at_once);
  MINFER_FITTED_TILES(MINFER_LAUNCH_IF)
}

// With fewer tiles, so that a kernel is compiled sooner, for 129 rows or more.
template <Layout kLayout, typename Finish, typename Problem>
void launch_fitting_many_rows(const Problem& g) {
  const auto at_once = fitted_at_once<Fitted<Problem, kLayout, 144, 128>, Finish>();
  const FittedChoice choice = remembered_choice(kTilesOfManyRows, g.m, g.n, g.k, kLayout == Layout::TN, at_once);
  MINFER_TILES_OF_MANY_ROWS(MINFER_LAUNCH_IF)
}

}  // namespace minfer
