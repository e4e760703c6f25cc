// v15_gemv: up to 8 rows of A; each warp streams B from memory right into the fragments of mma.sync. No shared tiles.
// Idea: with B^T on the 16-row side of m16n8k16 the 8 columns are the rows of A, so that 8 of them cost what 1 does, and
// the multiply-adds nothing. The order of k within a product is free: a lane's 16 bytes are fragments as they come.
// `launch_constants<8, 4096, 4096, 4>` in a file of its own is the same with sizes compiled in (`gemv.cuh`).
// Expected: the speed of memory, B read once (4096x4096: 8 us at 4.2 TB/s). A lane has 8 loads of 16 bytes in flight, an
// SM with 16 warps 64 KB; bandwidth x latency asks for 4.2 TB/s x 600 ns / 132 = 19 KB.
// Measured (H200, bfloat16, TN, float32, m=8, n=28672, k=4096): 27.74 TFLOP/s cold, 29.47 steady; 94.0 % and 89.5 % of torch.
#include "gemv.cuh"

namespace minfer {

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  STD_TORCH_CHECK(g.m <= kMostM, "hgemm: this kernel takes m up to ", kMostM, ", got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v15_gemv, minfer::launch)
