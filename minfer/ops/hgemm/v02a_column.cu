// v02a_column: v02, but the threads of a warp read down a column of a tile in shared memory (banks.cuh).
// Idea: none, this is the mistake. A row is 128 bytes, which is all 32 banks, so a column lies in one bank and a warp's read
// of it is split into one access a lane.
// Expected: several times slower than v02: each read of B's tile takes 32 accesses instead of one, and ncu counts 31
// conflicts a request.
// Measured (H200, bfloat16, TN, float32, m=n=k=2048): 0.4952 TFLOP/s cold, 0.4875 steady; 0.0823 % and 0.0775 % of torch.
#include "banks.cuh"

namespace minfer {

struct Place {
  static constexpr int kStride = kTile;
  __device__ static int at(int row, int col) { return row * kStride + col; }
};

template <typename T>
void launch(const Gemm<T>& g) {
  launch_banks<Place>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v02a_column, minfer::launch)
