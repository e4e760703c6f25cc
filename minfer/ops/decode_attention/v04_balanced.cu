// v04_balanced: v03's mainloop under a schedule that each launch makes on the device from the present lengths.
// Idea: as many blocks as run at once get equal shares of all work, which is one list, sequence by sequence and head by head; a
// share may end within a head of a sequence. Each block sums the lengths and finds its share by itself. So there is no plan on
// the host and no kernel before, and a captured CUDA graph stays correct and balanced when lengths, pages and their order
// change. Of the blocks that have parts of one item, the last to arrive adds the parts in their order; the item's arrival
// counter wraps to zero. The copies of a block's next piece start before its warps add up the present one.
// Expected: with equal lengths, v03's time and the 1 us that a block needs to find its share. For one long
// sequence among 63 short ones, the time that their bytes take, where v03 has SMs that wait for the longest part.
// Measured (H200, bfloat16, none, full, none, batch=16, new=1, longest=8192, heads=32, kv_heads=8, head_dim=128): 4025 GB/s
//   cold; 93.8 % of torch.
#include "cuda/attention/schedule.cuh"
#include "cuda/counters.cuh"
#include "packed.cuh"

namespace minfer {

using Units = Steps<kUnit, 8, 8>;  // 8 steps for a set-up took less time on an H200 than 2 or 4 did

// A piece, and the blocks that have pieces of its item: `count` from `first` on.
struct Work {
  Piece piece;
  int first, count;
  bool there;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    balanced(Decode<typename Shape::T, typename Shape::KV> p, Parts parts, unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  // Not in registers, because the sums need them; each warp has its own, because warps do not wait for each other.
  __shared__ Share<Units> shares[Shape::kWarps];
  __shared__ Work works[Shape::kWarps][2];
  const int warp_number = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
  {
    const Share<Units> mine = share_of_block<Units, Shape::kThreads>(p, tiles, blockIdx.x, gridDim.x);
    if (lane == 0) shares[warp_number] = mine;
  }
  PackedWarp<Shape> warp(p, shared);
  const auto find = [&](Work& work) {
    if (lane == 0) {
      Share<Units>& s = shares[warp_number];
      work.there = s.next(p);
      if (work.there)
        work = {{s.number, s.item / tiles, s.item % tiles * Shape::kRows, s.keys, s.begin, s.stop}, s.first, s.count, true};
    }
    __syncwarp();
  };
  const auto start = [&](const Work& work) {
    if (!work.there) return;
    warp.start(work.piece);
    warp.load_q(work.piece.number, work.piece.kv_head, work.piece.row0);
  };
  int turn = 0;
  find(works[warp_number][0]);
  start(works[warp_number][0]);
  clear_empty<Shape::kThreads>(p);
#pragma unroll 1
  for (; works[warp_number][turn].there; turn ^= 1) {
    const Work &work = works[warp_number][turn], &next = works[warp_number][turn ^ 1];
    find(works[warp_number][turn ^ 1]);  // while the first copies are under way
    const Piece piece = work.piece;
    warp.run(piece);
    start(next);
    const int number = piece.number, kv_head = piece.kv_head, row0 = piece.row0;
    const int rows = min(Shape::kRows, p.rows() - row0), first = work.first, count = work.count;
    warp.leave(shared, stats[warp_number], rows);
    // A block has parts of two items at most: of the one that it ends, and of the one that it begins.
    add_warps<Shape>(shared, stats, rows, [&](int row, int column, const Merged& all) {
      if (count == 1) return store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
      const int slot = 2 * blockIdx.x + (int(blockIdx.x) == first);  //@ slot
      parts.sums_at(slot, row, column) = all.sums;
      if (column == 0) parts.stats_at(slot, row) = {all.base, all.total};
    });
    if (count > 1 && is_last(counters + first, count))
      add_parts<Shape::kThreads, Shape::kBatch>(p, parts, number, kv_head, row0, count,
                                                [=](int i) { return 2 * (first + i) + (i == 0); });
    __syncthreads();  // all have read what the warps left
  }
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  require_vectors(p);
  for_power_of_two(p.dim, [&]<int kDim>() {
    for_rows<kDim>(p, [&]<typename Shape>() {
      const int blocks = std::min(Shape::kResident * multiprocessors(), kMostCounters), rows = std::min(Shape::kRows, p.rows());
      const Tensor memory = scratch_words(Parts::words(2 * blocks, rows, Shape::kVDim));
      const Parts parts = Parts::at(memory.mutable_data_ptr(), 2 * blocks, rows, Shape::kVDim);
      allow_shared(balanced<Shape>, Shape::kBytes);
      balanced<Shape><<<blocks, Shape::kThreads, Shape::kBytes, p.stream>>>(p, parts, counters_of(p.stream));
    });
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v04_balanced, minfer::launch)
