// v02_one_wave: gemm_bias_relu's v03 with GELU: the smallest tiles that all run at once.
// Idea: at 1024x256x512 what counts is how soon the first bytes are asked for and how little follows the last. 128 tiles of
// 64 x 32 (TN) are one wave of an H200. The biases are read while the first copies are under way.
// Expected: gemm_bias_relu's v03 and 0.2 us for GELU, of which a thread has 16: 0.6 of v01's time at 1024x256x512.
// Measured (H200, float16, TN, m=n=k=8192): 589.1 TFLOP/s cold; 80.3 % of torch.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biased_strips.cuh"

namespace minfer {

template <typename T, Layout kLayout, int kM, int kN, int kWarpgroups>
using Alone = Shape<T, kLayout, kM, kN, kWarpgroups, 1, 1, true>;

template <Layout kLayout, typename T>
void launch_layout(const Activated<T, Gelu>& g) {
  if constexpr (kLayout == Layout::TN)  // in NN a copy brings 64 columns
    if (one_wave(g, 64, 32)) return launch_shape<Alone<T, kLayout, 64, 32, 1>>(g);
  if (one_wave(g, 64, 64)) return launch_shape<Alone<T, kLayout, 64, 64, 1>>(g);
  if (one_wave(g, 64, 128)) return launch_shape<Alone<T, kLayout, 64, 128, 2>>(g);
  launch_shape<Alone<T, kLayout, 128, 128, 2>>(g);
}

template <typename T>
void launch(const Biased<T>& biased, Gelu gelu) {
  require_rows(biased);
  const Activated<T, Gelu> g{biased, gelu};
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v02_one_wave, minfer::launch)
