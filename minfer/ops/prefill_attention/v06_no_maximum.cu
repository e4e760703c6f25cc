// v06_no_maximum: steps without a maximum, and an order of tiles in which all multiprocessors end together.
// Idea: five changes to v05. (1) The base of a row's exponentials need not be its maximum: any base serves whose exponentials
// do not overflow. So scores become exponentials of the present base at once, and only if these add up to too much is the
// maximum taken and the block done again. A step then has no comparisons and no shuffles, and rounds between the exponentials.
// (2) Tiles with the most keys come first, for all heads of a group whose keys and values stay in L2. In v05, which goes head
// by head, the longest tile of the last head starts when almost nothing else is left. (3) Blocks that are neither masked nor
// capped have a loop of their own. (4) Stages are known at compile time. (5) Keys and the values of the block before them
// arrive at one barrier, because their products are started together, and in the order in which stages become free.
// Expected: (2) a model that deals tiles of known length to 132 multiprocessors keeps them busy for 78 % of a causal launch in
// v05's order and for 97 % in this one at 1 x 2048, 95 and 100 % at 1 x 8192. (1) The chain of a step, from one product to the
// next, falls from 1870 to 1420 cycles by the SASS, and a step's products take 2048: 680 TFLOP/s at 1 x 16384.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=16384, seq_kv=16384, heads=32, kv_heads=32, head_dim=128): 808.2
//   TFLOP/s cold; 133.3 % of torch.
#include "no_maximum.cuh"

namespace minfer {

using namespace no_maximum;

// Takes tiles from the counter and copies for them until there are none. The first tile of a block is its own number. `drawn`
// counts the others, of all blocks, and the last one wraps it to zero.
template <typename T, int kDim, int kDimV>
__device__ void produce(const TilesOf<T, kDim, kDimV>& tile, const Attention<T>& p, const AttentionMaps& maps, Slots* slots,
                        const Order& order, unsigned* drawn) {
  using Tile = TilesOf<T, kDim, kDimV>;
  tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Phases keys, values;
  Ring<kSlots> slot;
  Ring<Tile::kTilesOfQ> of_q;
  bool first = true;
  // Takes the next tile and tells the consumers.
  const auto take = [&] {
    Work w{-1, 0, 0, {}, 0, 0};
    for (int index = 0; !w.exists() && index < order.pieces();) {
      index = first ? blockIdx.x : gridDim.x + atomicInc(drawn, order.pieces() - 1);
      first = false;
      if (index < order.pieces()) w = work_of<Tile::kBlockN>(p, index, order);
    }
    w.blocks = max(w.blocks, 1);  // rows that see no key see one block, all of whose scores are hidden
    barrier_wait(slots->empty + slot.stage, slot.parity ^ 1);
    slots->work[slot.stage] = w;
    barrier_arrive(slots->full + slot.stage);
    slot.advance();
    return w;
  };
  for (Work w = take(); w.exists();) {
    tile.load_q(p, maps, w, of_q.stage, of_q.parity);
    of_q.advance();
    // In the order in which the consumers release stages: the scores of a block come before the product with the values of the
    // one before it.
    tile.load_keys(p, maps, w, w.blocks - 1, 0, keys.parity(0));
    keys.flip(0);
    int stage = 0;
#pragma unroll 1
    for (int block = w.blocks - 1; block > 0; --block, stage ^= 1) {
      tile.load_keys_and_values(p, maps, w, block - 1, stage ^ 1, keys.parity(stage ^ 1), values.parity(stage));
      keys.flip(stage ^ 1), values.flip(stage);
    }
    const Work next = take();  // before the wait for the last stage, which takes longer
    tile.load_values(p, maps, w, 0, stage, values.parity(stage));
    values.flip(stage);
    w = next;
  }
}

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           unsigned* counters) {
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
    if (threadIdx.x == kConsumers * 128) produce<T, kDim>(tile, p, maps, slots, order, counters);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim, kDimV>(tile, p, slots).attend(maps);
}

template <typename T>
void launch(const Attention<T>& p) {
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel needs v with a head_dim of at most 128, got ", p.v_dim);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    constexpr int kBytes = Consumer<T, kDim, kDimV>::kBytes;
    const AttentionMaps maps = make_maps(p, TilesOf<T, kDim, kDimV>::kBlockN);
    const Order order = make_order(p, kL2Bytes);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, kBytes, p.stream>>>(maps, p, order, counters_of(p.stream));
  };
  // Values of 192 or 256 would spill.
  if (p.dim == 64) launch_dims.template operator()<64, 64>();
  else if (p.dim == 96) launch_dims.template operator()<96, 96>();
  else if (p.dim == 128) launch_dims.template operator()<128, 128>();
  else launch_dims.template operator()<192, 128>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v06_no_maximum, minfer::launch)
