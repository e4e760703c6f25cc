// v13_fp8_in_place: v06 over keys and values in fp8, side by side or in pages of any power of two.
// Idea: the warpgroup that copies also widens. Each of its threads copies pieces of 16 bytes by cp.async. A piece goes to one of
// the two places in shared memory that its 16 numbers will have in q's dtype, in the stage from which wgmma reads them. The
// thread waits for its own copies, and overwrites each piece with its numbers. So the bytes need no memory of their own, which a
// block with heads of 128 does not have, and no thread waits for another's bytes. What multiplies is v06's, and so are its tiles
// and their order. The scale of keys is a part of the scale of scores; the sums are multiplied once by that of values.
// Expected: 0.7 to 0.9 of v10's speed. There are two stages for values. The copies for a block can start when both consumers have
// multiplied the values of the block two before it. The first consumer needs them half a step later, after 1024 cycles. In that
// time four warps can just copy 128 x 128 numbers from the L2 and widen them. (Measured: 0.36 to 0.51 of it.)
#include "fp8_attention.h"
#include "no_maximum.cuh"
#include "widened.cuh"

namespace minfer {

constexpr int kCopyBarrier = kTurnBarrier + kConsumers;  // of the threads that copy

// What one thread of 128 copies of a block of keys or values: in each slab of 64 columns 16 columns of every 32nd row.
template <typename Tile, typename P>
struct Widener {
  using T = typename Tile::T;
  static constexpr int kBlockN = Tile::kBlockN, kRowsAtOnce = 32, kOwn = kBlockN / kRowsAtOnce;
  static_assert(kBlockN % kRowsAtOnce == 0);

  const P& p;
  const int thread = threadIdx.x % 128, row = thread / 4, col = thread % 4 * 16;

  // Where the keys of the thread's rows lie: among all slots or, without pages, in the sequence's tensor. -1: there is no key.
  struct Places {
    int of[kOwn];
  };
  __device__ Places find(const Work& w, int block) const {
    Places places;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = (w.first_block + block) * kBlockN + row + i * kRowsAtOnce;
      places.of[i] = -1;
      if (key >= w.s.keys) continue;  //@ no_key
      if constexpr (P::kPaged)
        places.of[i] = p.place_of(w.number, key);  //@ page_of_key
      else
        places.of[i] = w.s.first_kv + key;
    }
    return places;
  }

  // Calls f(to, first, i) for each piece: 16 columns from `first` on, of the thread's i-th row, which begins at `to` in a slab of
  // a stage.
  template <int kCols, typename F>
  __device__ void for_pieces(T* stage, F f) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int slab = 0; slab < (kCols + 63) / 64; ++slab)
        if (kCols % 64 == 0 || slab * 64 + col < kCols)
          f(stage + slab * kBlockN * 64 + (row + i * kRowsAtOnce) * 64, slab * 64 + col, i);
  }
  // Where a piece's first, or second, 8 numbers begin in a row of a slab, in the 128-byte swizzle.
  __device__ int chunk(int which) const { return (col / 8 + which ^ row % 8) * 8; }  //@ chunk_of_piece

  // Starts the copies of a block; zeros where there is no key.
  template <int kCols>
  __device__ void copy(T* stage, const Rows<const Float8E4M3>& rows, const Places& places, int number, int head) const {
    for_pieces<kCols>(stage, [&](T* to, int first, int i) {
      const int place = max(places.of[i], 0);
      const Float8E4M3* from;
      if constexpr (P::kPaged) from = p.at_place(rows, place, head);
      else from = rows.at(number, place, head);
      cp_async_16(to + chunk(0), from + first, places.of[i] >= 0);
    });
    cp_async_commit();
  }

  // Waits for these copies, and widens what they brought.
  template <int kCols>
  __device__ void widen(T* stage) const {
    cp_async_wait<0>();  //@ own_bytes_arrived
    for_pieces<kCols>(stage, [&](T* row, int, int) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(row + chunk(0));
      *reinterpret_cast<uint4*>(row + chunk(0)) = widened_eight<T>(bytes.x, bytes.y);
      *reinterpret_cast<uint4*>(row + chunk(1)) = widened_eight<T>(bytes.z, bytes.w);
    });
  }

  __device__ static void sync() { named_barrier_sync(kCopyBarrier, 128); }

  // Tells the consumers that all threads' numbers are there.
  __device__ void arrive(uint64_t* full) const {
    fence_async();  // wgmma reads what was written
    sync();  //@ all_widened
    if (thread == 0) barrier_arrive(full);
  }
};

// As that of v06; a whole warpgroup calls it. One thread takes a tile, and all read it in its slot.
template <typename T, int kDim, int kDimV, typename P>
__device__ void produce(const TilesOf<T, kDim, kDimV>& tile, const P& p, const AttentionMaps& maps, Slots* slots,
                        const Order& order, unsigned* drawn) {
  using Tile = TilesOf<T, kDim, kDimV>;
  const Widener<Tile, P> widener{p};
  const bool is_first = widener.thread == 0;
  Phases keys, values;
  const auto take = [&](unsigned number) -> const Work* {
    const unsigned slot = number % kSlots;
    if (is_first) {
      Work w{-1, 0, 0, {}, 0, 0};
      for (bool draws = number > 0; !w.exists(); draws = true) {
        const int index = draws ? gridDim.x + atomicInc(drawn, order.pieces() - 1) : blockIdx.x;
        if (index >= order.pieces()) break;
        w = work_of<Tile::kBlockN>(p, index, order);
      }
      w.blocks = max(w.blocks, 1);
      barrier_wait(slots->empty + slot, number / kSlots % 2 ^ 1);
      slots->work[slot] = w;
      barrier_arrive(slots->full + slot);
    }
    widener.sync();  //@ work_written
    return slots->work + slot;
  };
  const Work* w = take(0);
  for (unsigned number = 0; w->exists();) {
    const int head = p.kv_head(w->head), of = w->number;
    int block = w->blocks - 1, stage = 0;
    auto of_values = widener.find(*w, block), next = widener.find(*w, max(block - 1, 0));
    if (is_first) tile.load_q(p, maps, *w, number % Tile::kTilesOfQ, number / Tile::kTilesOfQ % 2);
    barrier_wait(tile.empty_k, keys.parity(0) ^ 1);
    widener.template copy<kDim>(tile.k, p.k, of_values, of, head);
    widener.template widen<kDim>(tile.k);
    widener.arrive(tile.full_k);
    keys.flip(0);
    const auto add_values = [&](int stage) {
      T* to = tile.v + stage * Tile::kV;
      barrier_wait(tile.empty_v + stage, values.parity(stage) ^ 1);
      values.flip(stage);
      widener.template copy<kDimV>(to, p.v, of_values, of, head);
      widener.template widen<kDimV>(to);
    };
#pragma unroll 1
    for (; block > 0; --block, stage ^= 1) {
      const int other = stage ^ 1;
      T* to = tile.k + other * Tile::kK;
      barrier_wait(tile.empty_k + other, keys.parity(other) ^ 1);
      keys.flip(other);
      widener.template copy<kDim>(to, p.k, next, of, head);
      widener.template widen<kDim>(to);
      add_values(stage);
      widener.arrive(tile.full_k + other);
      of_values = next, next = widener.find(*w, max(block - 2, 0));  //@ next_places
    }
    w = take(++number);
    add_values(stage);
    widener.arrive(tile.full_v + stage);
  }
}

// As `attend` of no_maximum.cuh, but the sums are multiplied by the scale of values.
template <typename Consumer>
__device__ void attend_scaled(Consumer& consumer, const AttentionMaps& maps, const float* scale_of_values) {
  auto& rows = consumer.rows;
  if (rows.warpgroup == 1) consumer.end_turn();
  for (unsigned number = 0;; ++number) {
    const unsigned slot = number % kSlots, tiles = Consumer::Tile::kTilesOfQ;
    barrier_wait(consumer.slots->full + slot, number / kSlots % 2);
    const Work& w = consumer.slots->work[slot];
    if (!w.exists()) break;
    consumer.of_q = __shfl_sync(0xffffffff, number % tiles, 0);
    barrier_wait(consumer.tile.full_q + consumer.of_q, number / tiles % 2);
    consumer.add_tile(w);
    const float scales[2] = {*scale_of_values, *scale_of_values};
    scale_rows(rows.out, scales);  //@ scale_of_values
    rows.store(maps, w);
    __syncwarp();
    rows.release(consumer.slots->empty + slot);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  if (rows.warpgroup == 0) consumer.begin_turn();
}

template <typename T, int kDim, int kDimV, typename P>
__global__ void __launch_bounds__(kThreads, 1)
    attend_fp8(const __grid_constant__ AttentionMaps maps, const __grid_constant__ P p, const Order order, unsigned* counters) {
  using Tile = TilesOf<T, kDim, kDimV>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile(shared);
  Slots* slots = reinterpret_cast<Slots*>(shared + Tile::kBytes);
  // The consumers' problem is in shared memory: its scale includes that of keys.
  Attention<T>* scaled = reinterpret_cast<Attention<T>*>(slots + 1);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kConsumers * 4);
    tile.init();
    *scaled = p;
    scaled->scale *= p.scales[0];  //@ scale_of_keys
  }
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kFewRegisters>();
    produce<T, kDim, kDimV>(tile, p, maps, slots, order, counters);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim, kDimV> consumer(tile, *scaled, slots);
  attend_scaled(consumer, maps, p.scales + 1);
}

// Threads copy keys and values, so these have no tensor maps.
template <typename P>
AttentionMaps make_maps_of_queries(const P& p) {
  check_rows_in_pieces(p.out, p.v_dim, "prefill_attention: out"), check_rows_in_pieces(p.q, p.dim, "prefill_attention: q");
  check_rows_in_pieces(p.k, p.dim, "prefill_attention: k"), check_rows_in_pieces(p.v, p.v_dim, "prefill_attention: v");
  AttentionMaps maps{};
  const auto make = [&](HeadsMap& map, const auto& of, int dim, int box) {
    return make_heads_map(map, of.begin, p.packed ? 1 : p.batch, p.seq_q, p.heads, dim, of.of_outer, of.of_inner, of.of_head, box);
  };
  STD_TORCH_CHECK(make(maps.q, p.q, p.dim, kBlockM) && make(maps.out, p.out, p.v_dim, kRowsOfWarp),
                  "prefill_attention: the driver knows no tensor map for these tensors; it must be one of CUDA 12 or newer, "
                  "and strides under 2^39 elements");
  return maps;
}

template <typename P>
void launch(const P& p) {
  using T = typename P::Element;
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel needs v with a head_dim of at most 128, got ", p.v_dim);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    constexpr int kBytes = Consumer<T, kDim, kDimV>::kBytes + sizeof(Attention<T>);
    static_assert(kBytes <= 227 << 10, "more than a block has");
    const AttentionMaps maps = make_maps_of_queries(p);
    const Order order = make_order(p, 2 * kL2Bytes);  // of elements that take half of the bytes
    const auto kernel = attend_fp8<T, kDim, kDimV, P>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, kBytes, p.stream>>>(maps, p, order, counters_of(p.stream));
  };
  if (p.dim == 64) launch_dims.template operator()<64, 64>();
  else if (p.dim == 96) launch_dims.template operator()<96, 96>();
  else if (p.dim == 128) launch_dims.template operator()<128, 128>();
  else launch_dims.template operator()<192, 128>();
}

}  // namespace minfer

MINFER_FP8_PREFILL_ATTENTION(prefill_attention_v13_fp8_in_place, minfer::launch)
