// The twin of `conflicts`: rows of 33 words, and no conflict.
#include "columns.cuh"

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  probe::launch_columns<1>(g);
}

MINFER_HGEMM(hgemm_padded, launch)
