// v08_split_k: v07's tiles; where there are fewer tiles than SMs, several blocks share the k of each (split_k.cuh).
// Idea: a product of 1024x1024 has 32 tiles of 128x256, and 100 of 132 SMs are idle. Four blocks a tile occupy 128 SMs; they
// leave partial sums in memory, and the block that arrives last adds them up.
// Expected: 2x over v07 at 1024 (a quarter of the steps, plus the partial-sum exchange through the L2), 1x where there are
// enough tiles, because nothing is split there.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 437.9 TFLOP/s cold, 410.8 steady; 56.0 % and 61.5 % of torch.
#include "hgemm.h"
#include "split_k.cuh"

namespace minfer {

template <typename T, Layout kLayout>
struct Tile : BlockTile<T, float, kLayout, 128, 256, 32, 4, 64, 64> {
  static constexpr int kBlocksPerSM = 1;
};

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  g.layout == Layout::TN ? launch_split_k<Tile<T, Layout::TN>, Layout::TN>(g)
                         : launch_split_k<Tile<T, Layout::NN>, Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v08_split_k, minfer::launch)
