// v11_fp8_promoted_slices: up to 128 rows of x; v06 with v08's sums: a block for each N-slice of W, all of them at once.
// Idea: v08's tiles of 128 x 256 are too few to keep all SMs reading W, and v04's copies stop at each barrier. Here a
// warpgroup waits for the tensor cores' sums of each stage and adds them up in registers. With few rows this wait is hidden: W
// takes longer to arrive than to multiply.
// Expected (16 x 28672 x 4096, H200): v06's 33 us, where v04 takes 61.
#include "fp8_slices.cuh"

namespace minfer {

template <typename Out, int kM, int kN>
using Slice = Shape<E4M3Pair, Layout::TN, kM, kN, kM / 64, 1, 1, false, Out, true>;

// The narrowest N-slices that all run at once. If not even the widest do, these run in several waves. With 128 rows, two
// warpgroups have no registers for 224 columns.
template <int kM, typename Out>
void launch_rows(const Scaled<Out>& g) {
  if (one_wave(g, kM, 32)) return launch_shape<Slice<Out, kM, 32>>(g);
  if (one_wave(g, kM, 64)) return launch_shape<Slice<Out, kM, 64>>(g);
  if (one_wave(g, kM, 112)) return launch_shape<Slice<Out, kM, 112>>(g);
  launch_shape<Slice<Out, kM, kM == 64 ? 224 : 192>>(g);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  STD_TORCH_CHECK(p.m <= 128, "quant_gemm: this kernel takes m up to 128, got ", p.m);
  const Scaled<T> g = make_scaled(p);
  g.m <= 64 ? launch_rows<64>(g) : launch_rows<128>(g);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v11_fp8_promoted_slices, false, true, minfer::launch)
