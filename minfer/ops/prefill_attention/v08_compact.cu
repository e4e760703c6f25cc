// v08_compact: v07's tiles for sequences so short that a cold launch mostly waits for its own code.
// Idea: at 32 x 128, 13 of v07's 44 us pass before its first tile is stored. Code that was not yet executed comes from memory,
// and the first copies wait for it, too. So this kernel has little code: one loop, in which a block's scores, softmax and
// product with values follow each other, and one softmax for first blocks and others, with a mask and without. They no longer
// overlap within a warpgroup, but those of two warpgroups do. Besides, queries, keys and values share one ring of stages in the
// order of their use; and a warp hands a tile over before it draws the next one, whose number takes a microsecond to come.
// Expected: 5 us less than v07 at 32 x 128 and shorter; slower than v07 where a tile has many blocks of keys.
#include "ring_items.cuh"

namespace minfer {

// The registers of a consumer warpgroup, and its loop.
template <typename T, int kDim, int kDimV>
struct Consumer : Rows64<RingTiles<T, kDim, kDimV>> {
  using Tile = RingTiles<T, kDim, kDimV>;
  using Base = Rows64<Tile>;
  using typename Base::Exponentials, typename Base::Scores;
  using Base::factor, Base::online, Base::out, Base::p, Base::release, Base::tiles, Base::warpgroup;

  const int log_packed;
  const float* const sinks;        // of each head, a score without a value; null: none
  uint32_t queries[kDim / 16][4];  // as fragments
  Ring<Tile::kStages> ring;

  __device__ Consumer(const Tile& tiles, const Attention<T>& p, int log_packed, const float* sinks)
      : Base(tiles, p), log_packed(log_packed), sinks(sinks) {}

  __device__ int first_query(const Work& w) const { return w.row0 + (warpgroup * kRows >> log_packed); }

  __device__ void wait(const Ring<Tile::kStages>& at) const { barrier_wait(tiles.full + at.stage, at.parity); }
  __device__ void leave() { release(tiles.empty + ring.stage), ring.advance(); }

  // Releases stages that it does not read. The lane that does it must not run ahead of the waiting lanes.
  __device__ void skip(int stages) {
#pragma unroll 1
    for (; stages > 0; --stages) {
      wait(ring);
      __syncwarp();
      leave();
    }
  }

  // Loads the queries of this warpgroup into registers, and skips those of the other one.
  __device__ void load_queries(const Item& item) {
    if (warpgroup == 1) skip(sees(item, 0));
    if (sees(item, warpgroup)) {
      const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
      wait(ring);  //@ queries_read
      const T* rows = tiles.v + ring.stage * Tile::kKV + (warp * kRowsOfWarp + lane % 16) * 64;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
        ldmatrix_x4(queries[step], rows + step / 4 * (kRows * 64) + ((step % 4 * 2 + lane / 16) ^ lane % 8) * 8);
      __syncwarp();
      leave();
    }
    if (warpgroup == 0) skip(sees(item, 1));
  }

  __device__ void start_scores(Scores& scores, int stage) const {
    const uint64_t cols = tile_descriptor(tiles.v + stage * Tile::kKV, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)  // a step is 32 bytes of a row; descriptors count 16 bytes
      wgmma_registers<T, false>(scores, queries[step], cols + step / 4 * (kKeys * 8) + step % 4 * 2, step > 0);
    wgmma_commit();
  }

  // The blocks, from `begin` to before `end`, in which all rows see all keys.
  __device__ Span clear_blocks(const Work& w) const {
    const int first = first_query(w), begin = p.span(w.s, first + (kRows >> log_packed) - 1).begin;
    return {(begin + kKeys - 1) / kKeys, p.span(w.s, first).end / kKeys};
  }

  // Applies the soft cap, if there is one, and hides the scores that a row must not see.
  __device__ void mask(Scores& scores, const Work& w, int block) const {
    if (p.softcap > 0.0f) this->cap(scores);
    const Span clear = clear_blocks(w);
    if (block >= clear.begin && block < clear.end) return;
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * kRowsOfWarp + lane / 4;
    const int first = first_query(w), column = block * kKeys + lane % 4 * 2;
    Span spans[2] = {p.span(w.s, first + (row >> log_packed)), p.span(w.s, first + (row + 8 >> log_packed))};
    for (Span& span : spans) span.begin -= column, span.end -= column;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      if (i / 4 * 8 + i % 2 >= spans[i / 2 % 2].end) scores[i] = -INFINITY;
    if (p.window == 0) return;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      if (i / 4 * 8 + i % 2 < spans[i / 2 % 2].begin) scores[i] = -INFINITY;
  }

  // Overwrites values behind the sequence's last one with zeros, as Rows64::clear_tail does, in fewer instructions.
  __device__ void clear_tail(const Work& w, int block, int stage) const {
    const int left = w.s.keys - block * kKeys;
    if (left >= kKeys) return;
    T* values = tiles.v + stage * Tile::kKV;
#pragma unroll 1
    for (int i = left * 8 + threadIdx.x % 128; i < kKeys * 8; i += 128)  // pieces of 16 bytes of a slab
#pragma unroll
      for (int slab = 0; slab < Tile::kSlabsV; ++slab) reinterpret_cast<uint4*>(values + slab * kKeys * 64)[i] = uint4{};
    fence_async();
    named_barrier_sync(kTailBarrier + warpgroup, 128);
  }

  // As OnlineRows::add, with the exponentials rounded to T as fragments of the product with the values.
  __device__ bool add_scores(const Scores& scores, Exponentials& exponentials, float (&rescale)[2]) {
    float highest[2] = {-INFINITY, -INFINITY}, exponent[2], part[2];
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i]);
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      const bool beyond = (highest[r] - online.base[r]) * factor > OnlineRows::kSlack;  // false for -inf of both
      const float next = beyond ? highest[r] : online.base[r];
      exponent[r] = base_of_row(next) * factor;
      rescale[r] = beyond ? exp2_approx(online.base[r] * factor - exponent[r]) : 1.0f;
      online.base[r] = next, grows |= beyond;
    }
    OnlineRows::add_exponentials<T>(scores, exponentials, factor, exponent, part);
#pragma unroll
    for (int r = 0; r < 2; ++r) online.sum[r] = fmaf(online.sum[r], rescale[r], part[r]);
    return __ballot_sync(0xffffffff, grows) != 0;
  }

  __device__ void add_block(const Work& w, int block, bool is_first) {
    Scores scores;
    Exponentials exponentials;
    float rescale[2];
    wait(ring);
    start_scores(scores, ring.stage);
    wgmma_wait_for<0>(scores);
    leave();
    mask(scores, w, block);
    bool grows;
    // With the smaller softmax and heads of 64, ptxas 13.0 puts the exponentials into the registers of the queries, which the
    // next block still needs. So that block's scores would be wrong.
    if constexpr (kDim == 64) grows = online.template add_rounded<T, false>(scores, exponentials, factor, rescale);
    else grows = add_scores(scores, exponentials, rescale);
    if (grows && !is_first) scale_rows(out, rescale);  //@ rescale
    wait(ring);
    clear_tail(w, block, ring.stage);  //@ clear_last
    this->start_out(exponentials, ring.stage, !is_first);
    wgmma_wait_for<0>(out);
    leave();
  }

  __device__ void attend(const AttentionMaps& maps) {
    for (Ring<kSlots> slot;; slot.advance()) {
      barrier_wait(tiles.slots->full + slot.stage, slot.parity);
      const Item& item = tiles.slots->items[slot.stage];  // a reference: it stays in shared memory and takes no registers
      if (!item.w.exists()) break;
      const Span seen = item.seen[warpgroup];
      online = OnlineRows{};
      load_queries(item);
      skip(2 * (item.loaded.end - seen.end));
#pragma unroll 1
      for (int block = seen.end - 1; block >= seen.begin; --block) add_block(item.w, block, block == seen.end - 1);
      skip(2 * (seen.begin - item.loaded.begin));
      store(maps, item.w);
      __syncwarp();
      release(tiles.slots->empty + slot.stage);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

  // Divides by the sums and writes the rows that exist; 0 for rows that saw no key. They pass through shared memory.
  __device__ void store(const AttentionMaps& maps, const Work& w) const {
    float inverse[2], lse[2];
    online.finish(factor, inverse, lse);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = w.row0 + (warp * kRowsOfWarp >> log_packed);
    const int batch = p.packed ? 0 : w.number, rows = p.rows(w.s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + r * 8, query = first + (row >> log_packed), head = w.head + (row & (1 << log_packed) - 1);
      if (query >= w.s.queries) inverse[r] = 0.0f, lse[r] = -INFINITY;  // rows behind the sequence's queries may be NaN
      if (sinks) inverse[r] /= 1.0f + exp2_approx((sinks[head] - lse[r]) * kLog2E);  //@ sink
      if (p.lse && lane % 4 == 0 && query < rows) *p.lse_at(batch, w.s, query, head) = lse[r];
    }
    T* boxes = tiles.out + warp * Tile::kSlabsV * Tile::kOutSlab;
    if (lane == 0) tma_store_wait<0>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kDimV / 16; ++n) {  // 16 columns
      float values[8];
      uint32_t fragment[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = this->scaled(n * 8 + i, inverse);
      to_fragment<T>(fragment, values, 0);
      stmatrix_x4(boxes + n / 4 * Tile::kOutSlab + lane % 16 * 64 + ((n % 4 * 2 + lane / 16) ^ lane % 8) * 8, fragment);
    }
    //@ whole_queries
    if (first + (kRowsOfWarp >> log_packed) <= rows) {
      fence_async();
      __syncwarp();
      if (lane != 0) return;
#pragma unroll
      for (int slab = 0; slab < Tile::kSlabsV; ++slab)
        tma_store_heads(maps.out, boxes + slab * Tile::kOutSlab, slab * 64, w.head, w.s.first_q + first, batch);
      tma_store_commit();
      return;
    }
    __syncwarp();
    // Rows at the end of a sequence, where a box would overwrite the next sequence: 16 bytes at a time.
#pragma unroll 1
    for (int i = lane; i < kRowsOfWarp * kDimV / 8; i += 32) {
      const int row = i / (kDimV / 8), piece = i % (kDimV / 8), query = first + (row >> log_packed);
      if (query >= rows) return;
      T* to = p.out.at(batch, w.s.first_q + query, w.head + (row & (1 << log_packed) - 1)) + piece * 8;
      const T* from = boxes + piece / 8 * Tile::kOutSlab + row * 64 + (piece % 8 ^ row % 8) * 8;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }
};

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           int log_packed, unsigned* counters, const float* sinks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const RingTiles<T, kDim, kDimV> tile(shared);
  const int warp = threadIdx.x / 32 - kWarpgroups * 4;
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    if (warp == 1) return hand_over_items(tile, p, order, log_packed, counters);
    if (threadIdx.x == kWarpgroups * 128) tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
    __syncthreads();
    if (threadIdx.x == kWarpgroups * 128) copy_to_ring(tile, p, maps, log_packed);
    return;
  }
  if (threadIdx.x < 32) tile.init();
  __syncthreads();
  registers_up<kMostRegisters>();
  Consumer<T, kDim, kDimV>(tile, p, log_packed, sinks).attend(maps);
}

template <typename T>
void launch(const Attention<T>& p, const float* sinks = nullptr) {
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel needs v with a head_dim of at most 128, got ", p.v_dim);
  for_dims(p.dim, p.v_dim, [&]<int kDim, int kDimV>() {
    if constexpr (kDimV <= 128) {
      constexpr int kBytes = RingTiles<T, kDim, kDimV>::kBytes;
      const int log_packed = find_log_packed(p);
      const AttentionMaps maps = make_packed_maps(p, kKeys, 1 << log_packed);
      const Order order = make_packed_order(p, log_packed);
      const auto kernel = attend<T, kDim, kDimV>;
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
      const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
      kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, counters_of(p.stream), sinks);
    }
  });
}

}  // namespace minfer

// What `minfer.attention` calls for heads with sinks, which the op does not have.
static void prefill_attention_v08_compact_sinks(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor q,
                                              const minfer::Tensor k, const minfer::Tensor v, const minfer::Tensor q_seqlens,
                                              const minfer::Tensor kv_seqlens, const minfer::Tensor sinks, bool causal,
                                              int64_t window, double softcap, double scale) {
  minfer::check_sizes(sinks, "prefill_attention: sinks", {q.size(q.dim() - 2)});
  minfer::check_contiguous(sinks, "prefill_attention: sinks");
  const float* of_heads = minfer::input<float>(sinks, "prefill_attention: sinks");
  minfer::dispatch(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale,
                   [&](const auto& p) { minfer::launch(p, of_heads); });
}
MINFER_OP(prefill_attention_v08_compact_sinks,
          "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor q_seqlens, Tensor kv_seqlens, Tensor sinks, "
          "bool causal=True, int window=0, float softcap=0.0, float scale=0.0) -> ()")
MINFER_PREFILL_ATTENTION(prefill_attention_v08_compact, minfer::launch)
