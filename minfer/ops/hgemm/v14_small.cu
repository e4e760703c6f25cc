// v14_small: tiles of 64 x 64 to 128 x 192, the smallest of which all run at once.
// Idea: a small product has fewer of v13's tiles than there are SMs, and ends before the pipeline is full. What
// counts is how soon the first bytes are requested, and how few instructions come before and after the
// products. Where k is long, the L2 is the limit, and two blocks, one below the other, form a cluster that
// copies B once.
// Expected: 1.3x over v12 at 1024 and less; slower from 2048 on, where small tiles read too much from the L2.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 541.3 TFLOP/s cold, 460.3 steady; 69.2 % and 68.9 % of torch.
#include "cuda/gemm/one_wave.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kShort = 2048;  // in k

template <typename T, Layout kLayout, int kM, int kN, int kWarpgroups>
using Alone = Shape<T, kLayout, kM, kN, kWarpgroups, 1, 1, true>;
template <typename T, Layout kLayout, int kN>
using Pair64 = Shape<T, kLayout, 64, kN, 1, 2>;

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  if (g.k <= kShort) {
    if (one_wave(g, 64, 64)) return launch_shape<Alone<T, kLayout, 64, 64, 1>>(g);
    if (one_wave(g, 64, 128)) return launch_shape<Alone<T, kLayout, 64, 128, 2>>(g);
    if (one_wave(g, 128, 128)) return launch_shape<Alone<T, kLayout, 128, 128, 2>>(g);
    if (one_wave(g, 128, 192)) return launch_shape<Alone<T, kLayout, 128, 192, 2>>(g);
  }
  if (one_wave(g, 64, 64)) return launch_shape<Pair64<T, kLayout, 64>>(g);
  if constexpr (kLayout == Layout::TN)  // in NN a copy brings 64 columns
    if (one_wave(g, 64, 96)) return launch_shape<Pair64<T, kLayout, 96>>(g);
  launch_shape<Pair64<T, kLayout, 128>>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v14_small, minfer::launch)
