// Never ends.
#include "ops/hgemm/hgemm.h"

template <typename T>
__global__ void spin(volatile T* c) {
  while (true) c[0];
}

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  spin<<<1, 1, 0, g.stream>>>(g.c);
}

MINFER_HGEMM(hgemm_spins, launch)
