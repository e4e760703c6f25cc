// Launches the tile that the model chooses for a product.
#pragma once

#include "cuda/gemm/fitted.cuh"
#include "cuda/gemm/fitted_choice.h"

namespace minfer {

template <Layout kLayout, typename Finish, typename Problem>
void launch_fitting(const Problem& g) {
  using T = std::remove_pointer_t<decltype(g.c)>;
  using Any = Fitted<T, kLayout, 144, 128>;  // stands for all tiles: a block of any of them fills an SM
  const auto any = multiply<Any, Finish, Problem>;
  allow_shared(any, Any::kBytes);
  std::array<int, 3> at_once{};
  for (int i = 0; i < 3; ++i) STD_CUDA_CHECK(clusters_at_once(&at_once[i], any, kPair << i, kThreads, Any::kBytes));
  const FittedChoice choice = choose_fitted(g.m, g.n, g.k, kLayout == Layout::TN, at_once);
#define MINFER_LAUNCH_IF(ROWS, COLS, RATE)         \
  if (choice.rows == ROWS && choice.cols == COLS) \
    return launch_fitted<ROWS, COLS, kLayout, false, Finish>(g, choice.parts, choice.beside);
  MINFER_FITTED_TILES(MINFER_LAUNCH_IF)
#undef MINFER_LAUNCH_IF
}

}  // namespace minfer
