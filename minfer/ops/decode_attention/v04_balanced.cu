// v04_balanced: v03's mainloop under a schedule that each launch makes on the device from the present lengths.
// Idea: as many blocks as run at once get equal shares of all work, which is one list, sequence by sequence and head by head; a
// share may end within a head of a sequence. Each block sums the lengths and finds its share by itself. So there is no plan on
// the host and no kernel before, and a captured CUDA graph stays correct and balanced when lengths, pages and their order
// change. Of the blocks that have parts of one item, the last to arrive adds the parts in their order; the item's arrival
// counter wraps to zero.
// Expected: with equal lengths, v03's time less the launch of its second kernel, which is about 2 us for one sequence of 2048.
// For one long sequence among 63 short ones, the time that their bytes take, where v03 has SMs that wait for the longest part.
#include "cuda/counters.cuh"
#include "packed.cuh"
#include "schedule.cuh"

namespace minfer {

using Units = Steps<kUnit, 4, 8>;  // the four steps of a set-up are a guess

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    balanced(Decode<typename Shape::T, typename Shape::KV> p, Parts parts, int stream) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Share<Units> share;  // not in registers, because the sums need them
  __shared__ bool more;
  __shared__ bool is_last;
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
  {
    const Share<Units> mine = share_of_block<Units, Shape::kThreads>(p, tiles, blockIdx.x, gridDim.x);
    if (threadIdx.x == 0) share = mine;
  }
  while (true) {
    if (threadIdx.x == 0) more = share.next(p);
    __syncthreads();
    if (!more) break;
    const Piece piece{share.number, share.item / tiles, share.item % tiles * Shape::kRows, share.keys, share.begin, share.stop};
    // A block has parts of two items at most: of the one that it ends, and of the one that it begins.
    attend<Shape>(p, piece, shared, [&](int row, int column, const Merged& all) {
      if (share.count == 1)
        return store_out(p, share.number, piece.kv_head, piece.row0 + row, column, all.divided(p.scale_of_v()));
      const int slot = 2 * blockIdx.x + (int(blockIdx.x) == share.first);
      parts.sums_at(slot, row, column) = all.sums;
      if (column == 0) parts.stats_at(slot, row) = {all.base, all.total};
    });
    const int first = share.first, count = share.count;
    if (count > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicInc(&arrivals[stream][first], count - 1) == unsigned(count - 1);
      __syncthreads();
    }
    if (count > 1 && is_last) {
      __threadfence();
      const int number = share.number, kv_head = share.item / tiles, row0 = share.item % tiles * Shape::kRows;
      const auto slot = [=](int i) { return 2 * (first + i) + (i == 0); };
      for (int i = threadIdx.x; i < min(Shape::kRows, p.rows() - row0) * (Shape::kDim / 4); i += Shape::kThreads) {
        const int row = i / (Shape::kDim / 4), column = i % (Shape::kDim / 4) * 4;
        const Merged all = merge_parts(parts, row, column, count, slot);
        store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
      }
    }
    __syncthreads();  // all have read the share
  }
  clear_empty<Shape::kThreads>(p);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  for_shape(p, [&]<typename Shape>() {
    const int blocks = std::min(Shape::kResident * multiprocessors(), kMostTeams), rows = std::min(Shape::kRows, p.rows());
    const Tensor memory = scratch_words(Parts::words(2 * blocks, rows, Shape::kDim));
    const Parts parts = Parts::at(memory.mutable_data_ptr(), 2 * blocks, rows, Shape::kDim);
    allow_shared(balanced<Shape>, Shape::kBytes);
    balanced<Shape><<<blocks, Shape::kThreads, Shape::kBytes, p.stream>>>(p, parts, number_of(p.stream));
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v04_balanced, minfer::launch)
