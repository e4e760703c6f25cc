// v07_fitted: hgemm's v18 with two weights, for 129 rows or more: tiles whose height fits M.
// Idea: at 277 rows v03's 256-row tiles compute 512 rows. v18's tiles have nearly any height. Here 64 columns of W1 and the
// same 64 of W2 lie one behind the other in a stage, so that a thread has both sums of an element, and gates them before it
// stores.
// Expected (H100): v18's time for a product with 2 n columns, 1.5x over v03 at 277 x 17408 x 5120.
#include "gated_unit.h"
#include "cuda/gemm/fitted_launch.cuh"

namespace minfer {

// A tile has as many columns of W1 as of W2, together 128 or 256. With 128, each warpgroup has half of the rows. The rates of
// tiles with 256 columns are those of v18; for 112 and 144 rows, which v18 lacks, they are near those of the neighbours. Those
// with 128 are guesses.
#define MINFER_GATED_TILES(F) \
  F(128, 128, 2, 1.10, 1.12) F(144, 128, 2, 1.10, 1.12) F(160, 128, 2, 1.10, 1.12) F(176, 128, 2, 1.10, 1.12) \
  F(192, 128, 2, 1.10, 1.12) F(208, 128, 2, 1.10, 1.12) F(224, 128, 2, 1.10, 1.12) F(240, 128, 2, 1.10, 1.12) \
  F(256, 128, 2, 1.10, 1.12) F(112, 256, 2, 1.10, 1.11) F(120, 256, 2, 1.10, 1.11) F(128, 256, 2, 1.10, 1.11) \
  F(136, 256, 2, 1.12, 1.12) F(144, 256, 2, 1.12, 1.12) F(152, 256, 2, 1.12, 1.12) F(160, 256, 2, 1.13, 1.12)

#define MINFER_GATED_TILE(...) {__VA_ARGS__},
constexpr FittedTile kGatedTiles[] = {MINFER_GATED_TILES(MINFER_GATED_TILE)};
#undef MINFER_GATED_TILE

// The gate of columns `col` and col + 8, with their biases; 0 where there are none.
template <typename T>
struct Gate {
  float first[2], second[2];
  bool silu;

  __device__ Gate(const Gated<T>& g, int col) : silu(g.silu) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = g.bias1 && col + 8 * i < g.n;
      first[i] = inside ? float(g.bias1[col + 8 * i]) : 0.0f;
      second[i] = inside ? float(g.bias2[col + 8 * i]) : 0.0f;
    }
  }
  __device__ float combine(float h1, float h2, int i) const { return gated(h1 + first[i], h2 + second[i], silu); }  //@ gate
  __device__ float operator()(float gated, bool) const { return gated; }
};

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g) {
  const auto at_once = fitted_at_once<Fitted<Gated<T>, kLayout, 144, 256>, Gate<T>>();
  const FittedChoice choice = remembered_choice(kGatedTiles, g.m, 2 * int64_t(g.n), g.k, kLayout == Layout::TN, at_once);
  using Finish = Gate<T>;
  MINFER_GATED_TILES(MINFER_LAUNCH_IF)
}

template <typename T>
void launch(const Gated<T>& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v07_fitted, minfer::launch)
