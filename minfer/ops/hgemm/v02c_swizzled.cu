// v02c_swizzled: v02a with an XOR instead of padding (banks.cuh).
// Idea: column c of row r is stored at c ^ r, so a row keeps all its elements in another order, and a column has one in each
// bank. It costs an XOR and no space; 16-byte pieces (v06) and TMA (v10) can use it too.
// Expected: v02b's time plus an integer operation a read, and no conflicts.
// Measured (H200, bfloat16, TN, float32, m=n=k=2048): 6.194 TFLOP/s cold, 6.148 steady; 1.03 % and 0.977 % of torch.
// Why: slower than v02b. Padded columns lie at a constant distance, an immediate in the load; each XORed address is computed:
//   306 instructions instead of 211, 64 registers instead of 31, and so half of the occupancy.
#include "banks.cuh"

namespace minfer {

struct Place {
  static constexpr int kStride = kTile;
  __device__ static int at(int row, int col) { return row * kStride + (col ^ row); }
};

template <typename T>
void launch(const Gemm<T>& g) {
  launch_banks<Place>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v02c_swizzled, minfer::launch)
