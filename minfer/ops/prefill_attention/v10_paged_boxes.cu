// v10_paged_boxes: v06 over keys and values in pages of at least 8 slots.
// Idea: the tensor map of k is of (pages, slots, heads, columns), and a block of 128 keys comes in boxes of one page each. In
// the 128-byte swizzle these lie as one box of the whole block would, so the products do not change. A box takes an instruction
// and the number of its page. The warp that copies has a lane for each box: all lanes read the page table at once, a block
// ahead, so that nothing waits for it. Boxes behind a sequence's last key read no page: the copy engine writes zeros there.
// Expected: the time of v06 with pages of 16: the 32 boxes of a step, of 2 KB each, are started while its products take 2048
// cycles.
// Measured (H200, bfloat16, packed, full, no, 16, batch=1, seq_q=2048, seq_kv=32768, heads=32, kv_heads=8, head_dim=128): 590.5
//   TFLOP/s cold; 174.3 % of torch.
#include "no_maximum.cuh"
#include "page_boxes.cuh"

namespace minfer {

using namespace no_maximum;

// As that of v06; a whole warp calls it. A tile stays in shared memory, from where the consumers read it, too, and its number says
// which slot and which tile of q are its own: so it takes few registers.
template <typename T, int kDim, int kDimV>
__device__ void produce(const TilesOf<T, kDim, kDimV>& tile, const PagedAttention<T>& p, const AttentionMaps& maps,
                        Slots* slots, const Order& order, int log_box, unsigned* drawn) {
  using Tile = TilesOf<T, kDim, kDimV>;
  constexpr int kBlockN = Tile::kBlockN;
  const Boxes<kBlockN, T> boxes{p, log_box};
  const bool is_first_lane = boxes.lane == 0;
  if (is_first_lane) tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Phases keys, values;
  const auto take = [&](unsigned number) -> const Work* {
    Work w{-1, 0, 0, {}, 0, 0};
    for (bool draws = number > 0;; draws = true) {
      int index = blockIdx.x;
      if (draws && is_first_lane) index = gridDim.x + atomicInc(drawn, order.pieces() - 1);
      index = __shfl_sync(0xffffffff, index, 0);
      if (index >= order.pieces()) break;
      w = work_of<kBlockN>(p, index, order);
      if (w.exists()) break;
    }
    w.blocks = max(w.blocks, 1);
    const unsigned slot = number % kSlots;
    barrier_wait(slots->empty + slot, number / kSlots % 2 ^ 1);
    if (is_first_lane) {
      slots->work[slot] = w;
      barrier_arrive(slots->full + slot);
    }
    __syncwarp();  // all lanes see it
    return slots->work + slot;
  };
  const auto expect = [&](uint64_t* full, int elements) {
    if (is_first_lane) barrier_expect(full, elements * sizeof(T));
    __syncwarp();
  };
  const auto copy_keys = [&](int stage, uint64_t* full, int head, int place) {
    boxes.template copy<Tile::kSlabs>(tile.k + stage * Tile::kK, maps.k, full, head, place);
  };
  const auto copy_values = [&](int stage, uint64_t* full, int head, int place) {
    boxes.template copy<Tile::kSlabsV>(tile.v + stage * Tile::kV, maps.v, full, head, place);
  };
  const Work* w = take(0);
  for (unsigned number = 0; w->exists();) {
    const int head = p.kv_head(w->head);
    const auto find = [&](int block) { return boxes.find(*w, w->token(block, kBlockN)); };
    int block = w->blocks - 1, of_values = find(block), next = find(max(block - 1, 0));
    if (is_first_lane) tile.load_q(p, maps, *w, number % Tile::kTilesOfQ, number / Tile::kTilesOfQ % 2);
    barrier_wait(tile.empty_k, keys.parity(0) ^ 1);
    expect(tile.full_k, Tile::kK);
    copy_keys(0, tile.full_k, head, of_values);
    keys.flip(0);
    int stage = 0;
#pragma unroll 1
    for (; block > 0; --block, stage ^= 1) {
      const int of_keys = next, other = stage ^ 1;
      next = find(max(block - 2, 0));  //@ next_boxes
      uint64_t* full = tile.full_k + other;
      barrier_wait(tile.empty_k + other, keys.parity(other) ^ 1);
      expect(full, Tile::kK + Tile::kV);
      copy_keys(other, full, head, of_keys);
      barrier_wait(tile.empty_v + stage, values.parity(stage) ^ 1);
      copy_values(stage, full, head, of_values);
      keys.flip(other), values.flip(stage);
      of_values = of_keys;
    }
    w = take(++number);
    barrier_wait(tile.empty_v + stage, values.parity(stage) ^ 1);
    expect(tile.full_v + stage, Tile::kV);
    copy_values(stage, tile.full_v + stage, head, of_values);
    values.flip(stage);
  }
}

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ PagedAttention<T> p, const Order order,
           int log_box, unsigned* counters) {
  using Tile = TilesOf<T, kDim, kDimV>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile(shared);
  Slots* slots = reinterpret_cast<Slots*>(shared + Tile::kBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kConsumers * 4);
    tile.init();
  }
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kFewRegisters>();
    if (threadIdx.x / 32 == kConsumers * 4) produce<T, kDim>(tile, p, maps, slots, order, log_box, counters);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim, kDimV>(tile, p, slots).attend(maps);
}

template <typename T>
void launch(const PagedAttention<T>& p) {
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel needs v with a head_dim of at most 128, got ", p.v_dim);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    constexpr int kBytes = Consumer<T, kDim, kDimV>::kBytes;
    const int log_box = find_log_box<TilesOf<T, kDim, kDimV>::kBlockN>(p);
    const AttentionMaps maps = make_maps(p, 1 << log_box);
    const Order order = make_order(p, kL2Bytes);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, kBytes, p.stream>>>(maps, p, order, log_box, counters_of(p.stream));
  };
  if (p.dim == 64) launch_dims.template operator()<64, 64>();
  else if (p.dim == 96) launch_dims.template operator()<96, 96>();
  else if (p.dim == 128) launch_dims.template operator()<128, 128>();
  else launch_dims.template operator()<192, 128>();
}

}  // namespace minfer

MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_v10_paged_boxes, minfer::launch)
