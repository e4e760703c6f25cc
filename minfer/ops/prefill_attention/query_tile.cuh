// Finds the queries of a block on the device, because the host does not know how long sequences are.
#pragma once

#include "prefill_attention.h"

namespace minfer {

// kRows queries of sequence `number` from row0 on; the last tile of a sequence has fewer. number -1: the block has nothing to
// do.
struct QueryTile {
  int number;
  Sequence s;
  int row0;
};

// How many blocks there are for each head: (tiles, sequences) of a padded batch. Packed sequences have at most as many
// tiles as their tokens fill, and one more for each sequence.
template <int kRows, typename T>
dim3 query_tiles(const Attention<T>& p) {
  const int64_t tiles = p.packed ? int64_t(p.seq_q) / kRows + p.batch : (int64_t(p.seq_q) + kRows - 1) / kRows;
  STD_TORCH_CHECK(tiles <= INT_MAX && p.heads <= 65535 && (p.packed || p.batch <= 65535),
                  "prefill_attention: more sequences or heads than a launch has blocks");
  return dim3(static_cast<unsigned>(tiles), p.heads, p.packed ? 1 : p.batch);
}

// The tile of this block; a whole warp calls it. The tiles of a sequence come from the last to the first: under a causal mask
// the last has the most work, and short tiles should end the launch.
template <int kRows, typename P>
__device__ QueryTile query_tile(const P& p) {
  if (!p.packed) return {static_cast<int>(blockIdx.z), p.sequence(blockIdx.z), int(gridDim.x - 1 - blockIdx.x) * kRows};
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < p.batch; first += 32) {  // a sequence for each lane
    const int number = first + lane;
    const int tiles = number < p.batch ? (p.sequence(number).queries + kRows - 1) / kRows : 0;
    int behind = tiles;  // tiles of this sequence and of all before it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, behind, step);
      if (lane >= step) behind += other;
    }
    const unsigned later = __ballot_sync(0xffffffff, before + behind > int(blockIdx.x));
    if (later != 0) {
      const int found = __ffs(later) - 1, end = before + __shfl_sync(0xffffffff, behind, found);
      return {first + found, p.sequence(first + found), (end - 1 - int(blockIdx.x)) * kRows};
    }
    before += __shfl_sync(0xffffffff, behind, 31);
  }
  return {-1, {}, 0};
}

}  // namespace minfer
