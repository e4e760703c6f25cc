// v01_naive: a thread has one element of each half of a head; for heads of any size.
// Idea: the definition, with the threads of a head next to each other, so that neighbours read neighbours.
// Expected: a fraction of the copy's speed for many tokens, because a thread has 4 or 8 bytes in flight, not 32 or 64.
// Measured (H100 80GB HBM3, bfloat16, none, none, tokens=16384, heads=32, kv_heads=8, head_dim=128, rotary_dim=128): 1434 GB/s
//   cold, 1444 steady; 686.3 % and 678.5 % of torch.
#include "heads.cuh"

namespace minfer {

template <typename T>
void launch(const RopeAppend<T>& p) {
  launch_heads<Element<T>, 1>(p);
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_v01_naive, minfer::launch)
