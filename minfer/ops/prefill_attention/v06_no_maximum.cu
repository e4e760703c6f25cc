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
// Measured (H100 80GB HBM3, bfloat16, padded, full, no, full, batch=1, seq_q=2048, seq_kv=2048, heads=32, kv_heads=8,
//   head_dim=128): 616.6 TFLOP/s cold; 100.3 % of torch.
#include "cuda/counters.cuh"
#include "hopper_attention.cuh"

namespace minfer {

constexpr int64_t kL2Bytes = 8 << 20;                    // of an H200's 60 MB
constexpr int kTurnBarrier = kTailBarrier + kConsumers;  // and one more
constexpr int kSlots = 4;                                // tiles that are taken and not yet stored
constexpr int kFewRegisters = 40, kMostRegisters = 232;

// As many tiles of q as shared memory has room for. Beside keys of 192, blocks of 112 keys or more would spill.
template <typename T, int kDim, int kDimV>
using TilesOf = Tiles<T, kDim, kDimV, kDim <= 128 ? 2 : 1, kDim <= 128 ? 128 : 96>;

// Tiles that the producer has taken, for the consumers to read.
struct Slots {
  Work work[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};

// The parities of the phases of stages. A tile always begins with stage 0, so that stages are known at compile time; after a
// tile with an odd number of blocks, stage 1 is left out.
struct Phases {
  uint32_t bits = 0;
  __device__ uint32_t parity(int stage) const { return bits >> stage & 1; }
  __device__ void flip(int stage) { bits ^= 1 << stage; }
};

template <typename T, int kDim, int kDimV>
struct Consumer {
  using Tile = TilesOf<T, kDim, kDimV>;
  using Rows = Rows64<Tile>;
  using Exponentials = typename Rows::Exponentials;
  using Scores = typename Rows::Scores;
  static constexpr int kBytes = Tile::kBytes + sizeof(Slots);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  const Tile& tile;
  const Attention<T>& p;
  Rows rows;
  Slots* const slots;
  Phases keys, values;
  unsigned of_q = 0;  // which tile of q

  __device__ Consumer(const Tile& tile, const Attention<T>& p, Slots* slots) : tile(tile), p(p), rows(tile, p), slots(slots) {}

  // Waits for this warpgroup's turn to start products; ends the turn.
  __device__ void begin_turn() const { named_barrier_sync(kTurnBarrier + rows.warpgroup, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - rows.warpgroup, 256); }

  // Waits for keys; except for a tile's first block, values of the block before have come with them into the other stage.
  __device__ void wait_keys(int stage) {
    barrier_wait(tile.full_k + stage, keys.parity(stage));
    keys.flip(stage);
  }
  // Waits for the values of a tile's last block, which come alone.
  __device__ void wait_values(int stage) {
    barrier_wait(tile.full_v + stage, values.parity(stage));
    values.flip(stage);
  }

  // Waits for the scores of a block, and makes them exponentials. Returns whether out must be multiplied with `rescale`.
  template <bool kFirst, bool kPlain>
  __device__ bool finish_scores(Scores& scores, Exponentials& exponentials, const Work& w, int block, int stage,
                                float (&rescale)[2]) {
    wgmma_wait_for<kFirst ? 0 : 1>(scores);
    rows.release(tile.empty_k + stage);
    if constexpr (!kPlain) rows.mask(scores, w, block);
    return rows.online.template add_rounded<T, kFirst>(scores, exponentials, rows.factor, rescale);
  }

  __device__ void finish_out(int stage) {
    wgmma_wait_for<0>(rows.out);
    rows.release(tile.empty_v + stage);
  }

  // Starts the scores of `block`, whose keys are in `stage`, and the product with the exponentials of the one before. The
  // softmax of these scores overlaps that product and those of the other warpgroup. The exponentials of two blocks have
  // registers of their own, because the product reads the one while the softmax writes the other.
  template <int kStage, bool kPlain>
  __device__ void step(Scores& scores, Exponentials (&exponentials)[2], const Work& w, int block) {
    float rescale[2];
    wait_keys(kStage);
    begin_turn();
    rows.start_scores(scores, kStage, of_q);
    rows.start_out(exponentials[1 - kStage], 1 - kStage, block + 2 < w.blocks);  //@ next_scores
    end_turn();
    const bool grows = finish_scores<false, kPlain>(scores, exponentials[kStage], w, block, kStage, rescale);
    finish_out(1 - kStage);
    if (grows) scale_rows(rows.out, rescale);  //@ rescale
  }

  // The last product of a tile.
  template <int kStage>
  __device__ void add_last(const Exponentials& exponentials, const Work& w) {
    rows.release(tile.empty_q + of_q);
    wait_values(kStage);
    begin_turn();
    rows.start_out(exponentials, kStage, w.blocks > 1);
    end_turn();
    finish_out(kStage);
  }

  // All blocks but the first one. Plain scores are neither capped nor hidden; they have a loop of their own, because the code
  // for others would stand between its instructions and miss the instruction cache.
  template <bool kPlain>
  __device__ void add_blocks(Scores& scores, Exponentials (&exponentials)[2], const Work& w) {
    int block = w.blocks - 1;
#pragma unroll 1
    while (true) {
      if (--block < 0) {
        add_last<0>(exponentials[0], w);
        break;
      }
      step<1, kPlain>(scores, exponentials, w, block);
      if (--block < 0) {
        add_last<1>(exponentials[1], w);
        break;
      }
      step<0, kPlain>(scores, exponentials, w, block);
    }
  }

  // Whether no block but the first one is masked.
  __device__ bool is_plain(const Work& w) const {
    const Span clear = rows.clear_blocks(w);
    return p.softcap <= 0.0f && clear.begin <= 0 && clear.end >= w.blocks - 1;
  }

  __device__ void attend(const AttentionMaps& maps) {
    if (rows.warpgroup == 1) end_turn();  // the first turn is the other one's
    for (unsigned number = 0;; ++number) {
      const unsigned slot = number % kSlots;
      barrier_wait(slots->full + slot, number / kSlots % 2);
      const Work& w = slots->work[slot];  // stays in shared memory, and takes no registers
      if (!w.exists()) break;
      of_q = __shfl_sync(0xffffffff, number % Tile::kTilesOfQ, 0);  // so that descriptors are in uniform registers
      barrier_wait(tile.full_q + of_q, number / Tile::kTilesOfQ % 2);  //@ queries_arrived
      add_tile(w);
      rows.store(maps, w);
      __syncwarp();
      rows.release(slots->empty + slot);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    if (rows.warpgroup == 0) begin_turn();  // takes the turn that the other one has ended, so that none is left
  }

  __device__ void add_tile(const Work& w) {
    Scores scores;
    Exponentials exponentials[2];
    float rescale[2];
    wait_keys(0);
    rows.start_scores(scores, 0, of_q);
    rows.online = OnlineRows{};
    finish_scores<true, false>(scores, exponentials[0], w, w.blocks - 1, 0, rescale);
    if (rows.has_tail(w, w.blocks - 1)) {
      if (w.blocks > 1) barrier_wait(tile.full_k + 1, keys.parity(1));
      else barrier_wait(tile.full_v, values.parity(0));
      rows.clear_tail(w, w.blocks - 1, 0);
    }
    if (is_plain(w)) add_blocks<true>(scores, exponentials, w);
    else add_blocks<false>(scores, exponentials, w);
  }
};

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
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel takes v with heads of up to 128, got ", p.v_dim);
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
