// The kernels of v14_key_parts: one attends to parts of the keys, another adds the parts up. v18_paged_parts has them, too, and
// so have v15_gathered and v16_fp8_gathered where they divide keys. They differ in how keys and values are copied.
#pragma once

#include "add_parts.cuh"
#include "short_rows.cuh"

namespace minfer {

// A part of an item: a range of the item's blocks of keys. Its results are in place `slot` of the memory.
struct Part : Item {
  int slot;
};

// The parts of all items: the first part of each, the second of each, and so on, so that items that share keys read them from L2
// at the same time. The last parts of a short item do not exist.
template <typename P>
struct AllParts {
  const P& p;
  const Order& order;
  const int log_packed, most;

  __device__ int count() const { return order.pieces() * most; }
  __device__ Part operator[](int index) const {
    Part part{item_of(p, index % order.pieces(), order, log_packed), index};
    const Span whole = part.loaded;
    const int number = index / order.pieces(), blocks = whole.end - whole.begin, parts = parts_of(blocks, most, kLeastBlocks);
    if (number >= parts) {
      part.w.number = -1;
      return part;
    }
    part.loaded.begin = whole.begin + blocks * number / parts;  //@ first_block
    part.loaded.end = whole.begin + blocks * (number + 1) / parts;  //@ behind_last
#pragma unroll
    for (Span& seen : part.seen)  // an empty one lies at an end of `loaded`
      seen = {min(max(seen.begin, part.loaded.begin), part.loaded.end), min(max(seen.end, part.loaded.begin), part.loaded.end)};
    return part;
  }
};
template <typename P>
AllParts(const P&, const Order&, int, int) -> AllParts<P>;

// kInHalves: as in `Consumer`.
template <typename T, int kDim, bool kInHalves = false>
struct PartConsumer : Consumer<T, kDim, Part, kInHalves> {
  using Base = Consumer<T, kDim, Part, kInHalves>;
  using Base::Base, Base::factor, Base::log_packed, Base::online, Base::out;

  __device__ void leave(const Parts& results, const Part& part) const {
    leave_sums(results, part.slot, online, factor, out,
               [&](int row) { return part.w.row0 + (row >> log_packed) < part.w.s.queries; });
  }
};

// What copies keys and values that lie side by side: one thread.
struct CopyByThread {
  static constexpr bool kStartsEarly = false;  // whether the launch begins before the previous one has ended

  // The warpgroup that copies calls it.
  template <typename Tile, typename P>
  __device__ void operator()(const Tile& tile, const P& p, const AttentionMaps& maps, int log_packed) const {
    if (threadIdx.x == kWarpgroups * 128) copy_items(tile, p, maps, log_packed);
  }
};

// P is an Attention<T>, or derived from it. The scale of keys is a part of the scale of scores, so that consumers have a copy
// of p, of which only the scale takes a register.
template <int kDim, typename P, typename Copy, typename T = typename P::Element>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend_to_parts(const __grid_constant__ AttentionMaps maps, const __grid_constant__ P p, const Order order, int log_packed,
                    int most, const Parts results, unsigned* counters, const Copy copy) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ShortTiles<T, kDim, Part> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 1) take_items(tile, AllParts{p, order, log_packed, most}, counters);
    else copy(tile, p, maps, log_packed);
    return;
  }
  registers_up<kMostRegisters>();
  const auto attend_to = [&](const Attention<T>& problem) {
    PartConsumer<T, kDim, kHasScales<P>> consumer(tile, problem, log_packed);
    consumer.attend_each([&](const Part& part) { consumer.leave(results, part); });
  };
  if constexpr (kHasScales<P>) {
    Attention<T> scaled = p;
    scaled.scale *= p.scales[0];  //@ keys_of_parts
    attend_to(scaled);
  } else {
    attend_to(p);
  }
}

// Adds up the parts of each row of an item, and writes the rows that exist; 0 for rows that saw no key. A thread has four
// columns of a row.
template <int kDim, typename P>
__global__ void __launch_bounds__(kCombineThreads)
    add_parts_of_rows(const __grid_constant__ P p, const Order order, int log_packed, int most, const Parts results) {
  constexpr int kThreadsOfRow = kDim / 4, kRowsOfBlock = kCombineThreads / kThreadsOfRow, kBlocks = kRowsOfItem / kRowsOfBlock;
  const int index = blockIdx.x / kBlocks, row = blockIdx.x % kBlocks * kRowsOfBlock + threadIdx.x / kThreadsOfRow;
  const int column = threadIdx.x % kThreadsOfRow * 4;
  const Item item = item_of(p, index, order, log_packed);
  wait_for_previous();
  const Work& w = item.w;
  const int query = w.row0 + (row >> log_packed), head = w.head + (row & (1 << log_packed) - 1);
  const int batch = p.packed ? 0 : w.number;
  if (!w.exists() || query >= p.rows(w.s)) return;
  const int blocks = item.loaded.end - item.loaded.begin;
  const int count = query < w.s.queries ? parts_of(blocks, most, kLeastBlocks) : 0;  //@ parts_there
  const auto slot = [=](int part) { return part * order.pieces() + index; };         //@ slot
  add_parts_of_row(p, results, row, column, count, slot, w, batch, query, head);
}

// How the keys of a problem's items are divided. It depends on the shape alone.
struct Division {
  int log_packed;
  Order order;  // of the items
  int most;     // parts of an item
};

template <typename T>
Division divide_keys(const Attention<T>& p) {
  const int log_packed = find_log_packed(p);
  Order order = make_packed_order(p, log_packed);
  const int queries = kRowsOfItem >> log_packed;
  if (p.packed) order.tiles = most_tiles(p, queries);
  return {log_packed, order, count_parts(order.pieces(), most_blocks(p, queries, kKeys), multiprocessors())};
}

// Starts both kernels. `rows`: keys in one box of TMA.
template <int kDim, typename P, typename Copy>
void launch_divided(const P& p, const Division& division, int rows, const Copy& copy) {
  using T = typename P::Element;
  constexpr int kBytes = ShortTiles<T, kDim, Part>::kBytes;
  const auto [log_packed, order, most] = division;
  const int64_t slots = int64_t(order.pieces()) * most;
  const Tensor memory = scratch_words(Parts::words(slots, kRowsOfItem, kDim));
  const Parts results = Parts::at(memory.mutable_data_ptr(), slots, kRowsOfItem, kDim);
  const AttentionMaps maps = make_packed_maps(p, rows, 1 << log_packed);
  const auto kernel = attend_to_parts<kDim, P, Copy>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int blocks = static_cast<int>(std::min<int64_t>(slots, multiprocessors()));
  unsigned* counters = counters_of(p.stream);
  if constexpr (Copy::kStartsEarly)
    STD_CUDA_CHECK(launch_early(kernel, 1, dim3(blocks), kThreadsOfBlock, kBytes, p.stream, maps, p, order, log_packed, most,
                                results, counters, copy));
  else
    kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, most, results, counters, copy);
  const int adding = order.pieces() * (kRowsOfItem * kDim / (4 * kCombineThreads));
  STD_CUDA_CHECK(launch_early(add_parts_of_rows<kDim, P>, 1, dim3(adding), kCombineThreads, 0, p.stream, p, order, log_packed,
                              most, results));
}

}  // namespace minfer
