// v05_pingpong: the softmax of one warpgroup under the products of the other, and under its own.
// Idea: three changes to v04. (1) With two named barriers the warpgroups take turns: one starts its products only when the
// other one has started its own, so that the two stay half a period apart. (2) Within a warpgroup, the scores of the next block
// of keys are started before out += p v of the present one, so that the softmax of those scores overlaps that product. (3) The
// kernel is persistent: blocks take work from a counter, and the copies of the next piece begin before the last one is
// finished. FlashAttention-3's scheme (Shah et al., 2024).
// Expected: the softmax's 1000 cycles overlap the other warpgroup's 1024: 700 TFLOP/s at long sequences. The paper has 740, and
// this card's products alone reach 800.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=16384, seq_kv=16384, heads=32, kv_heads=32, head_dim=128): 560.1
//   TFLOP/s cold; 92.4 % of torch.
#include "cuda/counters.cuh"
#include "hopper_attention.cuh"

namespace minfer {

constexpr int kTurnBarrier = kTailBarrier + kConsumers;  // and one more
constexpr int kSlots = 2;                                // pieces of work that the producer may be ahead

// Work that the producer has taken from the counter, for the consumers to read.
struct Slots {
  int index[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};

template <typename T, int kDim, int kDimV>
struct Pingpong {
  using Tile = Tiles<T, kDim, kDimV>;
  using Rows = Rows64<Tile>;
  static constexpr int kBytes = Tile::kBytes + sizeof(Slots);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  const Tile& tile;
  const Attention<T>& p;
  Rows rows;
  Ring<Tile::kStages> keys, values;
  uint32_t parity_of_q = 0;
  //@ Scopes<Timeline> scopes{timeline};

  __device__ Pingpong(const Tile& tile, const Attention<T>& p) : tile(tile), p(p), rows(tile, p) {}

  // Waits for this warpgroup's turn to start products; ends the turn.
  __device__ void begin_turn() const { named_barrier_sync(kTurnBarrier + rows.warpgroup, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - rows.warpgroup, 256); }

  // Waits for scores, releases the stage of their keys, masks the scores and adds them to the softmax. Returns whether out must
  // be multiplied with `rescale`.
  template <int kPending>
  __device__ bool finish_scores(typename Rows::Scores& scores, const Work& w, int block, float (&rescale)[2]) {
    wgmma_wait_for<kPending>(scores);
    //@ scopes.end(kScores), scopes.begin();
    rows.release(tile.empty_k + keys.stage);
    keys.advance();
    rows.mask(scores, w, block);
    return rows.online.add(scores, rows.factor, rescale);
  }

  __device__ void wait_values(const Work& w, int block) {
    barrier_wait(tile.full_v + values.stage, values.parity);
    rows.clear_tail(w, block, values.stage);
  }

  __device__ void finish_out() {
    wgmma_wait_for<0>(rows.out);  //@ out_done
    rows.release(tile.empty_v + values.stage);  //@ release_v
    values.advance();
  }

  // One piece of work.
  __device__ void attend(const AttentionMaps& maps, const Work& w) {
    rows.clear();
    if (w.blocks > 0) {
      typename Rows::Exponentials exponentials;
      typename Rows::Scores scores;
      float rescale[2];
      bool grows = false;  // out is still zero
      barrier_wait(tile.full_q, parity_of_q);
      parity_of_q ^= 1;
      barrier_wait(tile.full_k + keys.stage, keys.parity);
      begin_turn();
      //@ scopes.begin();
      rows.start_scores(scores, keys.stage);
      end_turn();
      finish_scores<0>(scores, w, w.blocks - 1, rescale);
      // The wait for out is at the head of the next iteration, not behind the softmax: within one basic block ptxas moves the
      // wait above the exponentials, which then no longer overlap the product.
#pragma unroll 1
      for (int i = w.blocks - 2;; --i) {
        if (i < w.blocks - 2) {
          //@ scopes.end(kSoftmax), scopes.begin();
          finish_out();
          //@ scopes.end(kOut), scopes.begin();
          if (grows) scale_rows(rows.out, rescale);  //@ rescale
        }
        rows.round(exponentials, scores);
        //@ scopes.end(kSoftmax);
        if (i < 0) break;
        barrier_wait(tile.full_k + keys.stage, keys.parity);
        wait_values(w, i + 1);
        //@ scopes.begin();
        begin_turn();
        //@ scopes.end(kTurn), scopes.begin();
        rows.start_scores(scores, keys.stage);
        rows.start_out(exponentials, values.stage);
        end_turn();
        grows = finish_scores<1>(scores, w, i, rescale);
      }
      rows.release(tile.empty_q);
      wait_values(w, 0);
      begin_turn();
      rows.start_out(exponentials, values.stage);
      end_turn();
      finish_out();
    }
    rows.store(maps, w);
  }
};

// Takes pieces of work from the counter and copies for them until there are none. The first piece of a block is its own number.
// `drawn` counts the others, of all blocks, and the last one wraps it to zero.
template <typename T, int kDim, int kDimV>
__device__ void produce(const Tiles<T, kDim, kDimV>& tile, const Attention<T>& p, const AttentionMaps& maps, Slots* slots,
                        const Order& order, unsigned* drawn) {
  using Tile = Tiles<T, kDim, kDimV>;
  Ring<Tile::kStages> ring;
  Ring<kSlots> slot;
  uint32_t parity_of_q = 0;
  for (int index = blockIdx.x;; slot.advance()) {
    barrier_wait(slots->empty + slot.stage, slot.parity ^ 1);
    slots->index[slot.stage] = index;
    barrier_arrive(slots->full + slot.stage);
    if (index >= order.pieces()) return;
    const Work w = work_of<Tile::kBlockN>(p, index, order);
    const int next = gridDim.x + atomicInc(drawn, order.pieces() - 1);
    if (w.exists() && w.blocks > 0) {
      tile.load(p, maps, w, ring, parity_of_q);
      parity_of_q ^= 1;
    }
    index = next;
  }
}

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           unsigned* counters) {
  using Tile = Tiles<T, kDim, kDimV>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile(shared);
  Slots* slots = reinterpret_cast<Slots*>(shared + Tile::kBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kConsumers * 4);
    tile.init();
  }
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) produce<T, kDim>(tile, p, maps, slots, order, counters);
    return;
  }
  registers_up<kConsumerRegisters>();
  Pingpong<T, kDim, kDimV> consumer(tile, p);
  if (warpgroup_index() == 1) consumer.end_turn();  // the first turn is the other one's
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(slots->full + slot.stage, slot.parity);
    const int index = slots->index[slot.stage];
    __syncwarp();
    consumer.rows.release(slots->empty + slot.stage);
    if (index >= order.pieces()) break;
    const Work w = work_of<Tile::kBlockN>(p, index, order);
    if (w.exists()) consumer.attend(maps, w);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  if (warpgroup_index() == 0) consumer.begin_turn();  // takes the turn that the other one has ended, so that none is left
}

template <typename T>
void launch(const Attention<T>& p) {
  for_dims(p.dim, p.v_dim, [&]<int kDim, int kDimV>() {
    constexpr int kBytes = Pingpong<T, kDim, kDimV>::kBytes;
    const AttentionMaps maps = make_maps(p, Tiles<T, kDim, kDimV>::kBlockN);
    const Order order = make_order(p);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, kBytes, p.stream>>>(maps, p, order, counters_of(p.stream));
  });
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v05_pingpong, minfer::launch)
