// v16_skinny: up to 128 rows of A; narrow tiles with many stages of cp.async, and k split over blocks (split_k.cuh).
// Idea: B is read once and every SM must be reading. So a tile has all rows of A and few columns of B, and where that makes
// too few tiles, several blocks share the k of one. Tensor cores idle anyway, so half-empty rows of 16 cost nothing.
// Expected: near the speed of memory up to m = 64 (4096x4096 of B: 8 us at 4.2 TB/s, and 2 us to add up); above that the
// operands' traffic from the L2 counts too: at 128x128 as many bytes of A as of B.
// Measured (H200, bfloat16, TN, float32, m=128, n=28672, k=4096): 290.2 TFLOP/s cold, 288.0 steady; 67.0 % and 72.7 % of torch.
#include "hgemm.h"
#include "split_k.cuh"

namespace minfer {

// Tiles for m up to kM. kBlocksPerSM run together on an H200, and have 96, 96, 64 and 32 KB of B in flight.
template <typename T, Layout kLayout, int kM>
struct Tile;
template <typename T, Layout kLayout>
struct Tile<T, kLayout, 16> : BlockTile<T, float, kLayout, 16, 64, 64, 4, 16, 16> {
  static constexpr int kBlocksPerSM = 4;
};
template <typename T, Layout kLayout>
struct Tile<T, kLayout, 32> : BlockTile<T, float, kLayout, 32, 64, 64, 4, 32, 16> {
  static constexpr int kBlocksPerSM = 4;
};
template <typename T, Layout kLayout>
struct Tile<T, kLayout, 64> : BlockTile<T, float, kLayout, 64, 128, 64, 3, 32, 32> {
  static constexpr int kBlocksPerSM = 2;
};
template <typename T, Layout kLayout>
struct Tile<T, kLayout, 128> : BlockTile<T, float, kLayout, 128, 128, 64, 3, 64, 32> {
  static constexpr int kBlocksPerSM = 1;
};

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  if (g.m <= 16) return launch_split_k<Tile<T, kLayout, 16>, kLayout>(g);
  if (g.m <= 32) return launch_split_k<Tile<T, kLayout, 32>, kLayout>(g);
  if (g.m <= 64) return launch_split_k<Tile<T, kLayout, 64>, kLayout>(g);
  launch_split_k<Tile<T, kLayout, 128>, kLayout>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  STD_TORCH_CHECK(g.m <= 128, "hgemm: this kernel takes m up to 128, got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v16_skinny, minfer::launch)
