// Launches the tile that the model chooses for a product.
#pragma once

#include "cuda/gemm/fitted.cuh"
#include "cuda/gemm/fitted_choice.h"

namespace minfer {

// How many clusters of 2, 4 and 8 blocks run at once. One kind of tile stands for all: a block of any of them fills an SM.
template <typename Any, typename Finish, typename Problem>
std::array<int, 3> fitted_at_once() {
  const auto any = multiply<Any, Finish, Problem>;
  allow_shared(any, Any::kBytes);
  std::array<int, 3> at_once{};
  for (int i = 0; i < 3; ++i) STD_CUDA_CHECK(clusters_at_once(&at_once[i], any, kPair << i, kThreads, Any::kBytes));
  return at_once;
}

template <Layout kLayout, typename Finish, typename Problem>
void launch_fitting(const Problem& g) {
  using T = std::remove_pointer_t<decltype(g.c)>;
  const auto at_once = fitted_at_once<Fitted<T, kLayout, 144, 128>, Finish, Problem>();
  const FittedChoice choice = choose_fitted(kFittedTiles, g.m, g.n, g.k, kLayout == Layout::TN, at_once);
#define MINFER_LAUNCH_IF(ROWS, COLS, RATE)         \
  if (choice.rows == ROWS && choice.cols == COLS) \
    return launch_fitted<ROWS, COLS, kLayout, false, Finish>(g, choice.parts, choice.beside);
  MINFER_FITTED_TILES(MINFER_LAUNCH_IF)
#undef MINFER_LAUNCH_IF
}

}  // namespace minfer
