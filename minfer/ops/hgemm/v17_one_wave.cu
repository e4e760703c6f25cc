// v17_one_wave: up to 128 rows of A; a block has all of them, and as many columns of B (an N-slice) as make one wave of
// blocks.
// Idea: B is read once, and every SM should request as much of it as possible from the first microsecond to the last. All
// blocks start together, stream their N-slice by TMA with shared memory full of copies in flight, and end together: k is not
// split, there is no partial-sum exchange, and A comes from the L2. The tensor cores idle anyway, so a wgmma of 64 rows may
// have only one that counts; but rows beyond m are not copied, not even as zeros.
// Expected: the time of B at the speed of memory and 6 us for launch, first bytes and last ones, which is v16's 8 us without
// its partial sums. Up to 128 rows, if the L2 can deliver A to all blocks: at m = 128 half as many bytes as B at n = 28672,
// and four times as many at 4096.
// Measured (H200, bfloat16, TN, float32, m=128, n=28672, k=4096): 455.6 TFLOP/s cold, 439.3 steady; 105.1 % and 111.0 % of
//   torch.
#include "cuda/gemm/strips.cuh"
#include "hgemm.h"

namespace minfer {

template <typename T>
void launch(const Gemm<T>& g) {
  launch_few_rows(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v17_one_wave, minfer::launch)
