// A missing semicolon.
#include "ops/hgemm/hgemm.h"

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  g.c[0] = g.a[0]
}

MINFER_HGEMM(hgemm_does_not_compile, launch)
