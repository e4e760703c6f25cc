// 32 loads in a bank at once: 31 conflicts an instruction.
#include "columns.cuh"

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  probe::launch_columns<0>(g);
}

MINFER_HGEMM(hgemm_conflicts, launch)
