// v02_vectors: 16-byte loads, one read of each row, and the values stay in registers to the end.
// Idea: a block has a row. Up to 16384 elements of a half type stay in its registers as fp32, so that the second pass reads and
// computes nothing; longer rows are read again from the L2.
// Expected: near the copy's speed for many rows: 16384 x 14336 in a half type read 940 MB and write 235 MB, 275 us at an H200's
// 4.28 TB/s; silu_mul and a kernel that quantises move 2.1 GB. For few rows a launch, one wait for memory and a barrier.
#include "rows.cuh"

namespace minfer {

template <typename T, typename Y>
void launch(const SiluMulQuant<T, Y>& p) {
  require_vectors(p);
  launch_rows<Vector<T>>(p);
}

}  // namespace minfer

MINFER_SILU_MUL_QUANT(silu_mul_quant_v02_vectors, minfer::launch)
