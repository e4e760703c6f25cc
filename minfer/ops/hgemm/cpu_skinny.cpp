// cpu_skinny: few rows of A: no packing, dot products along k, an element of B converted once for up to 4 rows.
// Idea: with few rows a product reads B once and does little with it; packing it, as cpu_blocked does, costs more than the
// product. `launch_constants<5, 4096>` in a file of its own is the same for 5 rows of 4096, all of them in one tile
// (`skinny_cpu.h`).
// Expected: several times cpu_blocked at m = 1, where that converts and stores all of B before it multiplies; slower from
// about 16 rows on, whose tiles read B four times.
#include "skinny_cpu.h"

namespace minfer {

template <typename T>
void launch(const Gemm<T>& g) {
  launch_constants<0, 0>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_cpu_skinny, minfer::launch)
