// v01_any_width: one element at a time, for rows of any width.
// Idea: v02_vectors for rows that do not consist of pieces of 16 bytes.
// Expected: a fraction of the copy's speed, because a thread has few bytes in flight.
#include "rows.cuh"

namespace minfer {

template <typename T, typename Y>
void launch(const AddRmsNormQuant<T, Y>& p) {
  launch_rows<Element<T>>(p);
}

}  // namespace minfer

MINFER_ADD_RMSNORM_QUANT(add_rmsnorm_quant_v01_any_width, minfer::launch)
