// v13_wide_heads: heads of 192 and 256, and of 192 with values of 128. Blocks have 128 keys. A warpgroup's softmax runs during
// the other one's products, and not during its own.
// Idea: v05 has blocks of 64 keys for these heads. Its scores then read q and k at 128 bytes a cycle, all that shared memory
// delivers, and the copies come on top. Five changes to v05. (1) Blocks of 128 keys: a product reads a row of q for twice as
// many keys, and shared memory is busy for 7/8 of the time of the products. (2) 64 x 128 scores beside 64 x 256 sums leave no
// registers for the exponentials of another block. So a warpgroup's softmax overlaps the products of the other one only, which
// take twice as long: in its turn, a warpgroup adds p v of a block to out and computes the scores of the next. (3) Two blocks
// of keys and two of values do not fit beside q. So keys and values come in a ring of pieces: 64 columns of 128 keys, or 32
// whole rows of values. The products with a piece take 256 cycles (with heads of 256). The piece is given back when they are
// done, while those with the next piece run. (4) A warp writes its 16 rows of out over its 16 rows of q, from where TMA stores
// them; then it copies q of the next tile. (5) v06's order of tiles, and its loop without masks.
// Expected (H200, 1 x 8192, causal): the tensor cores idle only at the ends of tiles, 2500 of 133000 cycles. Products alone
// reach 800 TFLOP/s; less what the clock loses under this load, 700.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=8192, seq_kv=8192, heads=16, kv_heads=16, head_dim=256): 786.0
//   TFLOP/s cold; 124.5 % of torch.
#include "wide_tiles.cuh"

namespace minfer {

template <typename T, int kDim, int kDimV>
struct WideConsumer {
  using Tile = WideTiles<T, kDim, kDimV>;
  using Rows = Rows64<Tile>;
  using Exponentials = typename Rows::Exponentials;
  using Scores = typename Rows::Scores;

  const Tile& tile;
  const Attention<T>& p;
  Rows rows;
  Ring<Tile::kStages> ring;
  uint32_t parity_of_q = 0;

  __device__ WideConsumer(const Tile& tile, const Attention<T>& p) : tile(tile), p(p), rows(tile, p) {}

  // Waits for this warpgroup's turn to start products; ends the turn.
  __device__ void begin_turn() const { named_barrier_sync(kTurnBarrier + rows.warpgroup, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - rows.warpgroup, 256); }

  // Each warp copies its own rows, when TMA has read its rows of out from there.
  __device__ void load_q(const AttentionMaps& maps, const Work& w) const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      uint64_t* full = tile.full_q + rows.warpgroup;
      tma_store_wait<0>();  //@ out_read
      barrier_expect(full, kRowsOfWarp * kDim * sizeof(T));
      for (int slab = 0; slab < Tile::kSlabs; ++slab)
        tma_load_heads(tile.out_box(warp, slab), maps.q, full, slab * 64, w.head, w.s.first_q + w.row0 + warp * kRowsOfWarp,
                       p.packed ? 0 : w.number);
    }
    __syncwarp();
  }

  // Starts out += exponentials v for the values of the ring's next piece, or scores += q kᵀ for the columns in it.
  __device__ void start_out(const Exponentials& exponentials, int number) {
    const uint64_t values = tile_descriptor(tile.piece(ring.stage), Tile::kValues * 128, 1024);
    constexpr int kSteps = Tile::kValues / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_registers_wide<T, true>(rows.out, exponentials[number * kSteps + step], values + step * 128, true);
  }
  __device__ void start_scores(Scores& scores, int slab) const {
    const uint64_t queries = tile_descriptor(tile.q + (slab * kBlockM + rows.warpgroup * kRows) * 64, 16, 1024);
    const uint64_t keys = tile_descriptor(tile.piece(ring.stage), 16, 1024);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<T, false>(scores, queries + step * 2, keys + step * 2, slab > 0 || step > 0);
  }

  // A turn. The products with a piece run while those with the next are started; then the piece is given back. The other
  // warpgroup's turn begins while the last ones run.
  template <bool kOut, bool kScores>
  __device__ void multiply(const Exponentials& exponentials, Scores& scores) {
    constexpr int kOfOut = kOut ? Tile::kPiecesOfV : 0, kGroups = kOfOut + (kScores ? Tile::kSlabs : 0);
    int before = 0;
    begin_turn();
#pragma unroll
    for (int group = 0; group < kGroups; ++group, ring.advance()) {
      barrier_wait(tile.full + ring.stage, ring.parity);  //@ piece_arrived
      wgmma_fence();
      if (group < kOfOut) start_out(exponentials, group);
      else start_scores(scores, group - kOfOut);
      wgmma_commit();
      if (group > 0) {
        wgmma_wait<1>();  //@ piece_done
        rows.release(tile.empty + before);
      }
      before = ring.stage;
    }
    end_turn();
    if constexpr (kOut) wgmma_wait_for<0>(rows.out);
    if constexpr (kScores) wgmma_wait_for<0>(scores);
    rows.release(tile.empty + before);
  }

  // Makes the scores of a block exponentials. kFirst: out is still zero.
  template <bool kFirst, bool kPlain>
  __device__ void soften(Exponentials& exponentials, Scores& scores, const Work& w, int block) {
    float rescale[2];
    if constexpr (!kPlain) rows.mask(scores, w, block);
    const bool grows = rows.online.add(scores, rows.factor, rescale);
    if constexpr (!kFirst) {
      if (grows) scale_rows(rows.out, rescale);  //@ sums_rescaled
    }
    rows.round(exponentials, scores);
  }

  // Rows64::clear_tail for the values of the block that is multiplied first, which has the sequence's last keys. They are the
  // ring's next pieces.
  __device__ void clear_tail(const Work& w) const {
    Ring<Tile::kStages> next = ring;
    for (int i = 0; i < Tile::kPiecesOfV; ++i, next.advance()) {
      barrier_wait(tile.full + next.stage, next.parity);
      const int left = w.s.keys - (w.first_block + w.blocks - 1) * Tile::kBlockN - i * Tile::kValues;
      const int first = min(max(left, 0), Tile::kValues) * 8;  // of pieces of 16 bytes
      for (int slab = 0; slab < Tile::kSlabsV; ++slab)
        for (int at = first + threadIdx.x % 128; at < Tile::kValues * 8; at += 128)
          reinterpret_cast<uint4*>(tile.piece(next.stage) + slab * Tile::kValues * 64)[at] = uint4{};
    }
    fence_async();
    named_barrier_sync(kTailBarrier + rows.warpgroup, 128);
  }

  // All blocks but the one that is multiplied first. Blocks are taken from the last to the first.
  template <bool kPlain>
  __device__ void add_blocks(Exponentials& exponentials, const Work& w) {
#pragma unroll 1
    for (int block = w.blocks - 2; block >= 0; --block) {
      Scores scores;
      multiply<true, true>(exponentials, scores);
      soften<false, kPlain>(exponentials, scores, w, block);
    }
  }

  __device__ void add_tile(const Work& w) {
    Exponentials exponentials;
    Scores scores;
    multiply<false, true>(exponentials, scores);
    soften<true, false>(exponentials, scores, w, w.blocks - 1);
    if (rows.has_tail(w, w.blocks - 1)) clear_tail(w);  //@ clear_tail
    const Span clear = rows.clear_blocks(w);
    if (p.softcap <= 0.0f && clear.begin <= 0 && clear.end >= w.blocks - 1) add_blocks<true>(exponentials, w);
    else add_blocks<false>(exponentials, w);
    multiply<true, false>(exponentials, scores);
  }

  __device__ void attend(const AttentionMaps& maps) {
    if (rows.warpgroup == 1) end_turn();  // the first turn is the other one's
    for (Ring<kSlots> slot;; slot.advance()) {
      barrier_wait(tile.slots->full + slot.stage, slot.parity);
      const Work& w = tile.slots->work[slot.stage];  // stays in shared memory, and takes no registers
      if (!w.exists()) break;
      rows.clear();
      if (w.blocks > 0) {
        load_q(maps, w);
        barrier_wait(tile.full_q + rows.warpgroup, parity_of_q);
        parity_of_q ^= 1;
        add_tile(w);
      }
      // A warp writes its rows of out over its rows of q. Its warpgroup has done its last product with q before its last turn.
      rows.store(maps, w);
      __syncwarp();
      rows.release(tile.slots->empty + slot.stage);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    if (rows.warpgroup == 0) begin_turn();  // takes the turn that the other one has ended, so that none is left
  }
};

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideTiles<T, kDim, kDimV> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kFewRegisters>();
    if (threadIdx.x == kConsumers * 128) produce(tile, p, maps, order, counters);
    return;
  }
  registers_up<kMostRegisters>();
  WideConsumer<T, kDim, kDimV>(tile, p).attend(maps);
}

template <typename T>
void launch(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim > 128, "prefill_attention: this kernel takes heads of 192 and 256, got ", p.dim);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    using Tile = WideTiles<T, kDim, kDimV>;
    const AttentionMaps maps = make_maps(p, Tile::kBlockN, kRowsOfWarp, Tile::kValues);
    const Order order = make_order(p, kL2Bytes);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, Tile::kBytes, p.stream>>>(maps, p, order, counters_of(p.stream));
  };
  if (p.dim == 256) launch_dims.template operator()<256, 256>();
  else p.v_dim == 192 ? launch_dims.template operator()<192, 192>() : launch_dims.template operator()<192, 128>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v13_wide_heads, minfer::launch)
