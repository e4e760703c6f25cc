// Up to 128 rows of A: a block has all of them and one N-slice of B, one wave of blocks if possible.
#pragma once

#include "cuda/gemm/one_wave.cuh"

namespace minfer {

template <typename T, Layout kLayout, int kM, int kN, int kPerSM = 1>
using Strip = Shape<T, kLayout, kM, kN, kM / 64, 1, kPerSM>;

// The narrowest strips that all run at once; if none do, one of the two widest, which may come in several waves.
template <Layout kLayout, int kM, typename Problem>
void launch_strips(const Problem& g) {
  using T = std::remove_pointer_t<decltype(g.c)>;
  if constexpr (kLayout == Layout::TN) {
    if (one_wave(g, kM, 32)) return launch_shape<Strip<T, kLayout, kM, 32>>(g);
    if (one_wave(g, kM, 48)) return launch_shape<Strip<T, kLayout, kM, 48>>(g);
    if (one_wave(g, kM, 64)) return launch_shape<Strip<T, kLayout, kM, 64>>(g);
    if (one_wave(g, kM, 112)) return launch_shape<Strip<T, kLayout, kM, 112>>(g);
    constexpr int kPerSM = kM == 64 ? 2 : 1, kWide = 224 / kPerSM, kWider = 256 / kPerSM;
    const int at_once = kPerSM * multiprocessors();
    if (ceil_div(g.n, kWide) > at_once && ceil_div(g.n, kWider) <= at_once)
      return launch_shape<Strip<T, kLayout, kM, kWider, kPerSM>>(g);
    launch_shape<Strip<T, kLayout, kM, kWide, kPerSM>>(g);
  } else {  // a copy brings 64 columns
    if (one_wave(g, kM, 64)) return launch_shape<Strip<T, kLayout, kM, 64>>(g);
    if (one_wave(g, kM, 128)) return launch_shape<Strip<T, kLayout, kM, 128>>(g);
    launch_shape<std::conditional_t<kM == 64, Strip<T, kLayout, kM, 128, 2>, Strip<T, kLayout, kM, 256>>>(g);
  }
}

template <typename Problem>
void launch_few_rows(const Problem& g) {
  STD_TORCH_CHECK(g.m <= 128, "gemm: this kernel takes m up to 128, got ", g.m);
  if (g.layout == Layout::TN)
    g.m <= 64 ? launch_strips<Layout::TN, 64>(g) : launch_strips<Layout::TN, 128>(g);
  else
    g.m <= 64 ? launch_strips<Layout::NN, 64>(g) : launch_strips<Layout::NN, 128>(g);
}

}  // namespace minfer
