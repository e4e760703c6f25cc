// v06_fp8_one_wave: up to 128 rows of x; hgemm's v17 with e4m3: a block for each N-slice of W, all of them at once.
// Idea: with few rows the time is that of reading W, and v05 has too few tiles of 128 x 256 to keep all SMs reading. v17's
// N-slices make one wave of blocks, which keep shared memory full of copies from the first microsecond to the last. Scales
// of columns are read during the first copies. A step in k has 128 fp8 elements, so there are half as many steps as in v17.
// Expected (16 x 28672 x 4096): 117 MB of W at 4.2 TB/s take 28 us; the launch, the first bytes and the last ones take 5 us.
// Measured (H200, bfloat16, fp8_fp8, fast, m=16, n=28672, k=4096): 112.7 TFLOP/s cold.
#include "fp8_slices.cuh"

namespace minfer {

template <typename Out, int kM, int kN, int kPerSM = 1>
using Slice = Shape<E4M3Pair, Layout::TN, kM, kN, kM / 64, 1, kPerSM, false, Out>;

// Picks the narrowest N-slices that all run at once. If not even the widest do, these run in several waves.
template <int kM, typename Out>
void launch_rows(const Scaled<Out>& g) {
  if (one_wave(g, kM, 32)) return launch_shape<Slice<Out, kM, 32>>(g);
  if (one_wave(g, kM, 64)) return launch_shape<Slice<Out, kM, 64>>(g);
  if (one_wave(g, kM, 112)) return launch_shape<Slice<Out, kM, 112>>(g);
  launch_shape<std::conditional_t<kM == 64, Slice<Out, kM, 112, 2>, Slice<Out, kM, 224>>>(g);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  STD_TORCH_CHECK(p.m <= 128, "quant_gemm: this kernel takes m up to 128, got ", p.m);
  const Scaled<T> g = make_scaled(p);
  g.m <= 64 ? launch_rows<64>(g) : launch_rows<128>(g);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v06_fp8_one_wave, false, true, minfer::launch)
