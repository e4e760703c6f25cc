// v13_three_warpgroups: v08_compact with three warpgroups that multiply.
// Idea: in v08 a warpgroup waits for its scores, computes their softmax, and waits for the product with the values. A tile of
// 64 queries and 128 keys takes 3.7 us that way, of which the tensor cores need 0.6, and two warpgroups hide little of each
// other's waits. Blocks of 64 keys leave registers for a third one: 160 a thread, of which 144 are scores, exponentials, out
// and queries. A tile then has 192 rows.
// Expected: 32 x 128 in 31 us, where v08 takes 37 and cuDNN 33. Nothing is gained where a sequence's rows are a multiple of 128
// and not of 192, and few.
#include "ring_rows.cuh"

namespace minfer {

template <typename T>
void launch(const Attention<T>& p) {
  launch_ring<3>(p, nullptr);
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v13_three_warpgroups, minfer::launch)
