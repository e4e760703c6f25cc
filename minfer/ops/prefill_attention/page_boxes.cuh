// How Hopper kernels read keys and values in pages: each lane of the warp that copies starts the copy of one box, a part of a
// block of keys that lies in one page.
#pragma once

#include "hopper_attention.cuh"

namespace minfer {

// The logarithm of the rows of a box: as many as a page has, but a power of two that divides kBlockN. The 128-byte swizzle
// repeats after 8 rows, so boxes of 8 rows or more side by side lie as one box would.
template <int kBlockN, typename T>
int find_log_box(const PagedAttention<T>& p) {
  STD_TORCH_CHECK(p.log_slots >= 3, "prefill_attention: this kernel takes pages of at least 8 slots, got ", p.slots());
  int log_box = 3;
  while (log_box < p.log_slots && kBlockN % (2 << log_box) == 0) ++log_box;
  return log_box;
}

template <int kBlockN, typename T>
struct Boxes {
  const PagedAttention<T>& p;
  const int log_box, lane = threadIdx.x % 32;
  static_assert(kBlockN / 8 <= 32, "a lane has one box");

  __device__ bool has_one() const { return lane < kBlockN >> log_box; }

  // Where the lane's box of the block of keys from `first` on begins, among all slots; -1 where there is no key.
  __device__ int find(const Work& w, int first) const {
    const int key = first + (lane << log_box);
    return has_one() && key < w.s.keys ? p.place_of(w.number, key) : -1;  //@ last_box
  }

  // Starts the copies of a block, whose bytes the barrier expects. Where there is no key, the box is of zeros: it begins behind
  // the last slot of a page.
  template <int kSlabs>
  __device__ void copy(T* tile, const HeadsMap& map, uint64_t* full, int head, int place) const {
    if (!has_one()) return;
    const int page = place < 0 ? 0 : place >> p.log_slots, slot = place < 0 ? p.slots() : place & p.slots() - 1;
    T* rows = tile + (lane << log_box) * 64;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_load_heads(rows + slab * kBlockN * 64, map, full, slab * 64, head, slot, page);
  }
};

}  // namespace minfer
