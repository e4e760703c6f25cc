// v07_short: many short sequences: less for each tile besides its products, and fewer products of hidden pairs.
// Idea: four changes to v06, whose tiles of 128 queries cost as much as three steps besides their steps. (1) The two warpgroups
// do not take turns. Each has queries, a place in the ring of keys, and an end of its own: one stores a tile while the other
// multiplies the next. (2) The query heads that share keys are packed into the rows of a tile, so that it has 16 queries of 8
// heads, say: keys are read once for all of them, and a sequence of 20 tokens fills a tile. (3) Blocks have 64 keys, and a
// warpgroup multiplies only those that its own 64 rows see: of 512 tokens, causal, 1/9 of the products are of hidden pairs, and
// 1/5 in v06. (4) The rings of keys and of values have four stages, so that the copies for the next tile begin a whole tile ahead.
// Expected: 8 x 512 causal reads and writes 84 MB, 28 us at an H100's 3 TB/s. v06 takes 66 us, of which its steps are 45 %; with
// the rest hidden under the steps of the other warpgroup: 40 us, 430 TFLOP/s.
#include "cuda/counters.cuh"
#include "cuda/tma_grouped_heads.cuh"
#include "hopper_attention.cuh"

namespace minfer {

constexpr int64_t kL2Bytes = 8 << 20;
constexpr int kWarpgroups = 2, kRowsOfItem = kWarpgroups * kRows, kThreadsOfBlock = (kWarpgroups + 1) * 128;
constexpr int kFewRegisters = 56, kMostRegisters = 224;
constexpr int kSlots = 3;       // items that are taken and not yet stored
constexpr int kStagesOfQ = 2;   // of each warpgroup
constexpr int kMostPacked = 16; // heads: the rows of a warp

// Rows of out for 2^log_packed neighbouring heads from `w.head` on: row r of a warpgroup is head r % packed of a query. A
// warpgroup has 64 rows, the queries of the second one follow those of the first. w.row0 is the first query; blocks of keys are
// numbered from the sequence's first key.
struct Item {
  Work w;
  Span loaded, seen[kWarpgroups];  // blocks: those that are copied, and of these those that each warpgroup multiplies
};

struct Slots {
  Item items[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};

// A block's shared memory and barriers.
template <typename T_, int kDim_, int kBlockN_>
struct ShortTiles {
  using T = T_;
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kSlabs = kDim / 64, kOutSlabs = kSlabs, kOutSlab = kRowsOfWarp * 64;
  static constexpr int kStages = kBlockN * kDim <= 64 * 128 ? 4 : 2, kStagesOfKeys = kStages, kStagesOfValues = kStages;
  static constexpr int kQ = kRows * kDim, kKV = kBlockN * kDim, kOut = kRowsOfItem * kDim;  // elements
  static constexpr int kBarriers = 2 * kWarpgroups * kStagesOfQ + 2 * (kStagesOfKeys + kStagesOfValues);
  static constexpr int kBytes = (kWarpgroups * kStagesOfQ * kQ + (kStagesOfKeys + kStagesOfValues) * kKV + kOut) * sizeof(T) +
                                kBarriers * sizeof(uint64_t) + sizeof(Slots);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *q, *k, *v, *out;
  uint64_t *full_q, *empty_q, *full_k, *empty_k, *full_v, *empty_v;
  Slots* slots;

  __device__ explicit ShortTiles(unsigned char* shared)
      : q(reinterpret_cast<T*>(shared)), k(q + kWarpgroups * kStagesOfQ * kQ), v(k + kStagesOfKeys * kKV),
        out(v + kStagesOfValues * kKV),
        full_q(reinterpret_cast<uint64_t*>(out + kOut)), empty_q(full_q + kWarpgroups * kStagesOfQ),
        full_k(empty_q + kWarpgroups * kStagesOfQ), empty_k(full_k + kStagesOfKeys), full_v(empty_k + kStagesOfKeys),
        empty_v(full_v + kStagesOfValues), slots(reinterpret_cast<Slots*>(empty_v + kStagesOfValues)) {}

  // One thread.
  __device__ void init() const {
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kWarpgroups * 4 + 1);
    for (int i = 0; i < kWarpgroups * kStagesOfQ; ++i) barrier_init(full_q + i, 1), barrier_init(empty_q + i, 4);
    for (int i = 0; i < kStagesOfKeys; ++i) barrier_init(full_k + i, 1), barrier_init(empty_k + i, kWarpgroups * 4);
    for (int i = 0; i < kStagesOfValues; ++i) barrier_init(full_v + i, 1), barrier_init(empty_v + i, kWarpgroups * 4);
    barrier_init_fence();
  }

  // Waits until a stage is empty, and starts the copy of kCount rows into it.
  template <int kCount>
  __device__ static void load(T* tile, const HeadsMap& map, uint64_t* full, uint64_t* empty, uint32_t parity, int head,
                              int token, int batch) {
    barrier_wait(empty, parity ^ 1);
    barrier_expect(full, kCount * kDim * sizeof(T));
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_load_heads(tile + slab * kCount * 64, map, full, slab * 64, head, token, batch);
  }
};

// The registers of a consumer warpgroup, and its loop.
template <typename T, int kDim, int kBlockN>
struct Consumer : Rows64<ShortTiles<T, kDim, kBlockN>> {
  using Tile = ShortTiles<T, kDim, kBlockN>;
  using Base = Rows64<Tile>;
  using typename Base::Exponentials, typename Base::Scores;
  using Base::factor, Base::online, Base::out, Base::p, Base::release, Base::tiles, Base::warpgroup;

  const int log_packed;
  static constexpr bool kHolds = kBlockN == 64;
  uint32_t queries[kDim / 16][4];  // as fragments
  Ring<Tile::kStagesOfKeys> keys;
  Ring<Tile::kStagesOfValues> values;
  Ring<kStagesOfQ> of_q;

  __device__ Consumer(const Tile& tiles, const Attention<T>& p, int log_packed) : Base(tiles, p), log_packed(log_packed) {}

  __device__ int first_query(const Work& w) const { return w.row0 + (warpgroup * kRows >> log_packed); }

  // Takes a tile of queries into registers, and gives its place back: with both operands in shared memory, a product with 64 keys
  // would read 128 bytes a cycle, all that there is.
  __device__ void load_queries() {
    const int stage = warpgroup * kStagesOfQ + of_q.stage, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    barrier_wait(tiles.full_q + stage, of_q.parity);  //@ queries_arrived
    if constexpr (!kHolds) return;
    const T* rows = tiles.q + stage * Tile::kQ + (warp * kRowsOfWarp + lane % 16) * 64;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      ldmatrix_x4(queries[step], rows + step / 4 * (kRows * 64) + ((step % 4 * 2 + lane / 16) ^ lane % 8) * 8);
    __syncwarp();
    release(tiles.empty_q + stage);
    of_q.advance();
  }

  __device__ void give_back_queries() {
    if constexpr (kHolds) return;
    release(tiles.empty_q + warpgroup * kStagesOfQ + of_q.stage);
    of_q.advance();
  }

  __device__ void start_scores(Scores& scores) const {
    const uint64_t cols = tile_descriptor(tiles.k + keys.stage * Tile::kKV, 16, 1024);
    const uint64_t rows = tile_descriptor(tiles.q + (warpgroup * kStagesOfQ + of_q.stage) * Tile::kQ, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {  // a step is 32 bytes of a row; descriptors count 16 bytes
      const uint64_t col = cols + step / 4 * (kBlockN * 8) + step % 4 * 2;
      if constexpr (kHolds) wgmma_registers<T, false>(scores, queries[step], col, step > 0);
      else wgmma<T, false>(scores, rows + step / 4 * (kRows * 8) + step % 4 * 2, col, step > 0);
    }
    wgmma_commit();
  }

  // The blocks, from `begin` to before `end`, of whose keys all rows see all.
  __device__ Span clear_blocks(const Work& w) const {
    const int first = first_query(w), begin = p.span(w.s, first + (kRows >> log_packed) - 1).begin;
    return {(begin + kBlockN - 1) / kBlockN, p.span(w.s, first).end / kBlockN};
  }

  // Caps scores and hides those that a row must not see, where that is due.
  __device__ void mask(Scores& scores, const Work& w, int block) const {
    if (p.softcap > 0.0f) this->cap(scores);
    const Span clear = clear_blocks(w);
    if (block >= clear.begin && block < clear.end) return;
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * kRowsOfWarp + lane / 4;
    const int first = first_query(w), column = block * kBlockN + lane % 4 * 2;
    Span spans[2] = {p.span(w.s, first + (row >> log_packed)), p.span(w.s, first + (row + 8 >> log_packed))};
    for (Span& span : spans) span.begin -= column, span.end -= column;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int key = i / 4 * 8 + i % 2;
      const Span& span = spans[i / 2 % 2];
      if (key < span.begin || key >= span.end) scores[i] = -INFINITY;
    }
  }

  // Blocks that only the other warpgroup multiplies. A lane that tells the producer must not run ahead of those that wait.
  __device__ void skip(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      barrier_wait(tiles.full_k + keys.stage, keys.parity);
      barrier_wait(tiles.full_v + values.stage, values.parity);
      __syncwarp();
      release(tiles.empty_k + keys.stage);
      release(tiles.empty_v + values.stage);
      keys.advance(), values.advance();
    }
  }

  __device__ void start_next_scores(Scores& scores) {
    barrier_wait(tiles.full_k + keys.stage, keys.parity);
    start_scores(scores);
  }
  // Starts out (+)= exponentials v with the values of a block.
  __device__ void start_next_out(const Exponentials& exponentials, bool add) {
    barrier_wait(tiles.full_v + values.stage, values.parity);
    this->start_out(exponentials, values.stage, add);
  }
  // Waits for scores, and makes them exponentials. Returns whether out must be multiplied with `rescale`.
  template <bool kFirst, bool kPlain>
  __device__ bool finish_scores(Scores& scores, Exponentials& exponentials, const Work& w, int block, float (&rescale)[2]) {
    wgmma_wait_for<kFirst ? 0 : 1>(scores);
    release(tiles.empty_k + keys.stage);
    keys.advance();
    if constexpr (!kPlain) mask(scores, w, block);
    return online.template add_rounded<T, kFirst>(scores, exponentials, factor, rescale);
  }
  __device__ void finish_out() {
    wgmma_wait_for<0>(out);
    release(tiles.empty_v + values.stage);
    values.advance();
  }

  // Starts the scores of `block` and the product with the exponentials of the one behind it. The softmax of these scores overlaps
  // that product, so the exponentials of two blocks have registers of their own.
  template <bool kPlain>
  __device__ void step(Scores& scores, const Exponentials& behind, Exponentials& exponentials, const Work& w, int block,
                       int end) {
    float rescale[2];
    start_next_scores(scores);
    start_next_out(behind, block + 2 < end);  //@ next_scores
    const bool grows = finish_scores<false, kPlain>(scores, exponentials, w, block, rescale);
    finish_out();
    if (grows) scale_rows(out, rescale);  //@ rescale
  }

  // All blocks but the first one. Plain scores are neither capped nor hidden; they have a loop of their own, as in v06.
  template <bool kPlain>
  __device__ void add_blocks(Scores& scores, Exponentials (&exponentials)[2], const Work& w, const Span& seen) {
    int block = seen.end - 1;
#pragma unroll 1
    while (true) {
      if (--block < seen.begin) {
        give_back_queries();
        start_next_out(exponentials[0], seen.begin + 1 < seen.end);
        break;
      }
      step<kPlain>(scores, exponentials[0], exponentials[1], w, block, seen.end);
      if (--block < seen.begin) {
        give_back_queries();
        start_next_out(exponentials[1], true);
        break;
      }
      step<kPlain>(scores, exponentials[1], exponentials[0], w, block, seen.end);
    }
    finish_out();
  }

  __device__ void add_tile(const Work& w, const Span& seen) {
    Scores scores;
    Exponentials exponentials[2];
    float rescale[2];
    load_queries();
    start_next_scores(scores);
    finish_scores<true, false>(scores, exponentials[0], w, seen.end - 1, rescale);
    if (w.s.keys < seen.end * kBlockN) {
      barrier_wait(tiles.full_v + values.stage, values.parity);
      this->clear_tail(w, seen.end - 1, values.stage);  //@ clear_tail
    }
    const Span clear = clear_blocks(w);
    if (p.softcap <= 0.0f && clear.begin <= seen.begin && clear.end >= seen.end - 1) {
      add_blocks<true>(scores, exponentials, w, seen);
    } else {
      add_blocks<false>(scores, exponentials, w, seen);
    }
  }

  __device__ void attend(const AttentionMaps& maps) {
    for (Ring<kSlots> slot;; slot.advance()) {
      barrier_wait(tiles.slots->full + slot.stage, slot.parity);
      const Item& item = tiles.slots->items[slot.stage];  // stays in shared memory, and takes no registers
      if (!item.w.exists()) break;
      const Span seen = item.seen[warpgroup];
      online = OnlineRows{};
      skip(item.loaded.end - seen.end);
      if (seen.begin < seen.end) add_tile(item.w, seen);
      skip(seen.begin - item.loaded.begin);
      store(maps, item.w);
      __syncwarp();
      release(tiles.slots->empty + slot.stage);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

  // Divides by the sums and writes the rows that exist; 0 for rows that saw no key.
  __device__ void store(const AttentionMaps& maps, const Work& w) const {
    float inverse[2], lse[2];
    online.finish(factor, inverse, lse);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = w.row0 + (warp * kRowsOfWarp >> log_packed);
    const int batch = p.packed ? 0 : w.number, rows = p.rows(w.s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + r * 8, query = first + (row >> log_packed), head = w.head + (row & (1 << log_packed) - 1);
      if (query >= w.s.queries) inverse[r] = 0.0f, lse[r] = -INFINITY;  // what lies behind the queries may be NaN
      if (p.lse && lane % 4 == 0 && query < rows) *p.lse_at(batch, w.s, query, head) = lse[r];
    }
    //@ whole_rows
    if (first + (kRowsOfWarp >> log_packed) <= rows) {
      this->store_boxes(inverse, maps, batch, w.s.first_q + first, w.head, warp, lane);
    } else {  // rows at the end of a sequence, where a box would overwrite the next sequence
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + r * 8, query = first + (row >> log_packed);
        if (query >= rows) continue;
        T* to = p.out.at(batch, w.s.first_q + query, w.head + (row & (1 << log_packed) - 1)) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
          round_to(*reinterpret_cast<typename Vector<T>::Pair*>(to + j * 8), this->scaled(j * 4 + r * 2, inverse),
                   this->scaled(j * 4 + r * 2 + 1, inverse));
      }
    }
  }
};

// Item `index` in this order; a whole warp calls it.
template <int kBlockN, typename T>
__device__ Item item_of(const Attention<T>& p, int index, const Order& order, int log_packed) {
  Item item{{-1, 0, 0, {}, 0, 0}, {0, 0}, {}};
  Work& w = item.w;
  const int group = (int64_t(index / order.tiles + 1) * order.groups - 1) / order.units, first = order.first_unit(group);
  const int units = order.first_unit(group + 1) - first, within = index - first * order.tiles, unit = first + within % units;
  const int rest = within / units, queries = kRowsOfItem >> log_packed;  // tiles of the unit that come before; queries of an item
  if (p.packed) {
    w.head = unit << log_packed;
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int number = lane; w.number < 0 && number - lane < p.batch; number += 32) {  // a sequence for each lane
      const int tiles = number < p.batch ? (p.sequence(number).queries + queries - 1) / queries : 0;
      int behind = tiles;  // tiles of this sequence and of those of the lanes before
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffff, behind, step);
        if (lane >= step) behind += other;
      }
      const unsigned later = __ballot_sync(0xffffffff, before + behind > rest);
      if (later != 0) {
        const int found = __ffs(later) - 1;
        w.row0 = (before + __shfl_sync(0xffffffff, behind, found) - 1 - rest) * queries;
        w.number = number - lane + found, w.s = p.sequence(w.number);
      }
      before += __shfl_sync(0xffffffff, behind, 31);
    }
    if (w.number < 0) return item;
  } else {
    const int units_of_sequence = p.heads >> log_packed;
    w.number = unit / units_of_sequence, w.head = unit % units_of_sequence << log_packed, w.s = p.sequence(w.number);
    w.row0 = (order.tiles - 1 - rest) * queries;
  }
  bool any = false;
#pragma unroll
  for (int i = 0; i < kWarpgroups; ++i) {
    const int from = w.row0 + i * queries / kWarpgroups, to = min(from + queries / kWarpgroups, w.s.queries);
    const int begin = p.span(w.s, from).begin, end = p.span(w.s, to - 1).end;
    if (from >= to || begin >= end) continue;  // rows that see nothing
    const Span seen = {begin / kBlockN, (end + kBlockN - 1) / kBlockN};
    item.seen[i] = seen;
    item.loaded = any ? Span{min(item.loaded.begin, seen.begin), max(item.loaded.end, seen.end)} : seen;
    any = true;
  }
#pragma unroll
  for (Span& seen : item.seen)
    if (seen.begin >= seen.end) seen = {item.loaded.begin, item.loaded.begin};
  return item;
}

// Takes items from the counter for the copying thread and the consumers, until there are none. The first item of a block is its
// own number. `drawn` counts the others, of all blocks, and the last one wraps it to zero. A whole warp calls it.
template <typename T, int kDim, int kBlockN>
__device__ void take_items(const ShortTiles<T, kDim, kBlockN>& tile, const Attention<T>& p, const Order& order, int log_packed,
                           unsigned* drawn) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  int index = blockIdx.x;
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->empty + slot.stage, slot.parity ^ 1);
    Item item{{-1, 0, 0, {}, 0, 0}, {0, 0}, {}};
    while (index < order.pieces() && !item.w.exists()) {
      item = item_of<kBlockN>(p, index, order, log_packed);
      if (is_first_lane) index = gridDim.x + atomicInc(drawn, order.pieces() - 1);
      index = __shfl_sync(0xffffffff, index, 0);
    }
    if (is_first_lane) {
      tile.slots->items[slot.stage] = item;
      barrier_arrive(tile.slots->full + slot.stage);
    }
    if (!item.w.exists()) return;
  }
}

// Copies for one item after the other. One thread calls it.
template <typename T, int kDim, int kBlockN>
__device__ void copy_items(const ShortTiles<T, kDim, kBlockN>& tile, const Attention<T>& p, const AttentionMaps& maps,
                           int log_packed) {
  using Tile = ShortTiles<T, kDim, kBlockN>;
  tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Ring<Tile::kStagesOfKeys> keys;
  Ring<Tile::kStagesOfValues> values;
  Ring<kStagesOfQ> of_q[kWarpgroups];
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->full + slot.stage, slot.parity);
    const Item& item = tile.slots->items[slot.stage];
    const Work& w = item.w;
    if (!w.exists()) return;
    const int batch = p.packed ? 0 : w.number, head = p.kv_head(w.head);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      if (item.seen[i].begin >= item.seen[i].end) continue;
      const int stage = i * kStagesOfQ + of_q[i].stage, query = w.row0 + (i * kRows >> log_packed);
      Tile::template load<kRows>(tile.q + stage * Tile::kQ, maps.q, tile.full_q + stage, tile.empty_q + stage, of_q[i].parity,
                                 w.head, w.s.first_q + query, batch);
      of_q[i].advance();
    }
    // In the order in which the consumers release stages: the scores of a block come before the product with the values of the
    // one before it.
#pragma unroll 1
    for (int block = item.loaded.end; block >= item.loaded.begin; --block) {
      if (block > item.loaded.begin) {
        Tile::template load<kBlockN>(tile.k + keys.stage * Tile::kKV, maps.k, tile.full_k + keys.stage,
                                     tile.empty_k + keys.stage, keys.parity, head, w.token(block - 1, kBlockN), batch);
        keys.advance();
      }
      if (block < item.loaded.end) {
        Tile::template load<kBlockN>(tile.v + values.stage * Tile::kKV, maps.v, tile.full_v + values.stage,
                                     tile.empty_v + values.stage, values.parity, head, w.token(block, kBlockN), batch);
        values.advance();
      }
    }
    barrier_arrive(tile.slots->empty + slot.stage);
  }
}

template <typename T, int kDim, int kBlockN>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order, int log_packed,
           int stream) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ShortTiles<T, kDim, kBlockN> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 1) take_items(tile, p, order, log_packed, &arrivals[stream][0]);
    else if (threadIdx.x == kWarpgroups * 128) copy_items(tile, p, maps, log_packed);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim, kBlockN>(tile, p, log_packed).attend(maps);
}

// How many heads that share keys are packed into a tile, as a power of 2.
template <typename T>
int find_log_packed(const Attention<T>& p) {
  int log_packed = 0;
  while (2 << log_packed <= kMostPacked && p.heads / p.kv_heads % (2 << log_packed) == 0) ++log_packed;
  return log_packed;
}

// The order of v06, of items instead of tiles.
template <typename T>
Order make_packed_order(const Attention<T>& p, int log_packed) {
  const int queries = kRowsOfItem >> log_packed;
  const int64_t whole = (int64_t(p.seq_q) + queries - 1) / queries, of_sequence = p.heads >> log_packed;
  const int64_t tiles = p.packed ? whole + p.batch : whole, units = p.packed ? of_sequence : p.batch * of_sequence;
  STD_TORCH_CHECK(tiles * units < INT_MAX, "prefill_attention: more tiles of out than fit 32 bits");
  const int64_t bytes = 2 * int64_t(p.seq_kv) * p.dim * sizeof(T) * p.kv_heads / of_sequence;
  const int64_t most = std::max<int64_t>({1, kL2Bytes / std::max<int64_t>(bytes, 1), multiprocessors() / std::max<int64_t>(tiles, 1)});
  return {static_cast<int>(units), static_cast<int>(tiles), static_cast<int>((units + most - 1) / most)};
}

template <typename T>
AttentionMaps make_packed_maps(const Attention<T>& p, int block_n, int packed) {
  require_vectors(p);
  AttentionMaps maps;
  const int batch = p.packed ? 1 : p.batch;
  const auto make = [&](HeadsMap& map, const auto& of, int tokens, int heads, int rows, int packed) {
    return make_grouped_heads_map(map, of.begin, batch, tokens, heads, p.dim, of.of_outer, of.of_inner, of.of_head,
                                  rows / packed, packed);
  };
  // Without any keys there is no tensor map, and no block uses one.
  STD_TORCH_CHECK(make(maps.q, p.q, p.seq_q, p.heads, kRows, packed) &&
                      make(maps.out, p.out, p.seq_q, p.heads, kRowsOfWarp, packed) &&
                      (p.seq_kv == 0 || (make(maps.k, p.k, p.seq_kv, p.kv_heads, block_n, 1) &&
                                         make(maps.v, p.v, p.seq_kv, p.kv_heads, block_n, 1))),
                  "prefill_attention: the driver knows no tensor map for these tensors; it must be one of CUDA 12 or newer, "
                  "and strides under 2^39 elements");
  return maps;
}

template <typename T>
void launch(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim <= 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const auto launch_as = [&]<int kDim, int kBlockN>() {
    constexpr int kBytes = ShortTiles<T, kDim, kBlockN>::kBytes;
    const int log_packed = find_log_packed(p);
    const AttentionMaps maps = make_packed_maps(p, kBlockN, 1 << log_packed);
    const Order order = make_packed_order(p, log_packed);
    const auto kernel = attend<T, kDim, kBlockN>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, number_of(p.stream));
  };
  p.dim == 64 ? launch_as.template operator()<64, 64>() : launch_as.template operator()<128, 64>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v07_short, minfer::launch)
