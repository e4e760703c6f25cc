// v02_block: a block, or a warp where sequences are short, sums a sequence once, 16 bytes a load; warps exchange their sums in
// shared memory.
// Idea: O(batch * length), read once and written once. The size of a block follows the length, so that a thread has about two
// vectors. The host knows the longest length of padded sequences, but only the mean of packed ones. `launch_block<256, 2048>`
// in a file of its own is the same with a size compiled in for sequences of up to 2048 (`block.cuh`).
// Expected: near the copy's speed for many long sequences. For few or short ones the latency of one round trip for the length,
// one of loads, one barrier and one of stores.
// Measured (H200, float32, padded, full, batch=1024, longest=2048): 2095 GB/s cold; 151.6 % of torch.
#include "block.cuh"

namespace minfer {

template <typename T>
void launch(const SeqSum<T>& p) {
  const int length = p.packed ? p.longest / std::max(1, p.batch) : p.longest;
  const int threads = length / (2 * Vector<T>::kCount);
  if (threads <= 32) launch_block<32, 0>(p);
  else if (threads <= 64) launch_block<64, 0>(p);
  else if (threads <= 128) launch_block<128, 0>(p);
  else if (threads <= 256) launch_block<256, 0>(p);
  else launch_block<512, 0>(p);
}

}  // namespace minfer

MINFER_SEQ_SUM(seq_sum_v02_block, minfer::launch)
