// What v11_paged_short and v18_paged_parts share: the copies for items whose keys and values are in pages, and v11's kernel,
// which v18 launches, too, where it does not divide keys.
#pragma once

#include "page_boxes.cuh"
#include "short_rows.cuh"

namespace minfer {

// As `copy_items`; a whole warp calls it.
template <typename Tile, typename T>
__device__ void copy_boxes(const Tile& tile, const PagedAttention<T>& p, const AttentionMaps& maps, int log_packed,
                           int log_box) {
  const Boxes<kKeys, T> boxes{p, log_box};
  const bool is_first_lane = boxes.lane == 0;
  if (is_first_lane) tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Ring<Tile::kStages> keys, values;
  uint32_t parity_of_q[kWarpgroups] = {};
  // Waits until a stage is empty, and starts the copy of a block into it.
  const auto load = [&](T* to, const HeadsMap& map, uint64_t* full, uint64_t* empty, Ring<Tile::kStages>& ring, int head,
                        int place) {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    if (is_first_lane) barrier_expect(full + ring.stage, Tile::kKV * sizeof(T));
    __syncwarp();
    boxes.template copy<Tile::kSlabs>(to + ring.stage * Tile::kKV, map, full + ring.stage, head, place);
    ring.advance();
  };
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->full + slot.stage, slot.parity);
    const typename Tile::Item& item = tile.slots->items[slot.stage];
    const Work& w = item.w;
    if (!w.exists()) return;
    const int batch = p.packed ? 0 : w.number, head = p.kv_head(w.head), begin = item.loaded.begin, end = item.loaded.end;
    int next = boxes.find(w, max(end - 1, 0) * kKeys), of_values = -1;
    if (is_first_lane) {
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) {
        if (item.seen[i].begin >= item.seen[i].end) continue;
        const int query = w.row0 + (i * kRows >> log_packed);
        Tile::template load<kRows>(tile.q + i * Tile::kQ, maps.q, tile.full_q + i, tile.empty_q + i, parity_of_q[i], w.head,
                                   w.s.first_q + query, batch);
        parity_of_q[i] ^= 1;
      }
    }
#pragma unroll 1
    for (int block = end; block >= begin; --block) {
      const int of_keys = next;
      if (block > begin) {
        next = boxes.find(w, max(block - 2, begin) * kKeys);  //@ next_boxes
        load(tile.k, maps.k, tile.full_k, tile.empty_k, keys, head, of_keys);
      }
      if (block < end) load(tile.v, maps.v, tile.full_v, tile.empty_v, values, head, of_values);
      of_values = of_keys;
    }
    __syncwarp();  // all lanes have read the item
    if (is_first_lane) barrier_arrive(tile.slots->empty + slot.stage);
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ PagedAttention<T> p, const Order order,
           int log_packed, int log_box, unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ShortTiles<T, kDim> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 1) take_items(tile, Items{p, order, log_packed}, counters);
    else if (warp == 0) copy_boxes(tile, p, maps, log_packed, log_box);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim>(tile, p, log_packed).attend(maps);
}

template <typename T>
void launch(const PagedAttention<T>& p) {
  STD_TORCH_CHECK(p.dim == 64 || p.dim == 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const auto launch_dim = [&]<int kDim>() {
    constexpr int kBytes = ShortTiles<T, kDim>::kBytes;
    const int log_packed = find_log_packed(p), log_box = find_log_box<kKeys>(p);
    const AttentionMaps maps = make_packed_maps(p, 1 << log_box, 1 << log_packed);
    const Order order = make_packed_order(p, log_packed);
    const auto kernel = attend<T, kDim>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, log_box, counters_of(p.stream));
  };
  p.dim == 64 ? launch_dim.template operator()<64>() : launch_dim.template operator()<128>();
}

}  // namespace minfer
