// v02_vectors: 16-byte loads and stores, one read of each row, and the packed sum stays in registers to the end.
// Idea: the root mean square divides all elements of a row by the same number, so the bytes do not depend on it: they are
// residual * weight, scaled by the largest of these. So one pass over a row computes both of its reductions.
// Expected: near the copy's speed for many rows: 16384 rows of 4096 in bfloat16 read 268 MB and write 201 MB, 110 us at
// 4.28 TB/s (H200); add_rmsnorm and a kernel that quantises move 738 MB. For few rows a launch, a load and two barriers.
#include "rows.cuh"

namespace minfer {

template <typename T, typename Y>
void launch(const AddRmsNormQuant<T, Y>& p) {
  require_vectors(p);
  launch_rows<Vector<T>>(p);
}

}  // namespace minfer

MINFER_ADD_RMSNORM_QUANT(add_rmsnorm_quant_v02_vectors, minfer::launch)
