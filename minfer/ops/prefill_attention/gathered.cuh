// What v15_gathered and v16_fp8_gathered share. One kernel copies the keys and values of each sequence to scratch memory, in
// q's dtype and without pages. Another one, with v06's consumers, reads the copy; or v14's two, for few queries over many keys.
#pragma once

#include <type_traits>

#include "cuda/dependent.cuh"
#include "cuda/fp8.cuh"
#include "fp8_attention.h"
#include "no_maximum.cuh"
#include "parts_kernel.cuh"

namespace minfer {

constexpr int kGatherers = 192;      // threads of a block that copies; a multiple of the pieces in each kind of row
constexpr int kKeysOfGatherer = 32;  // that such a block copies
constexpr int kInFlight = 4;         // pieces that a thread reads before it writes them

// A problem whose keys and values are in the copy, (batch, seq_kv, kv_heads, columns). Where q is packed, TMA takes all rows of
// the copy for those of one batch, and sequence b begins at row b * seq_kv. Packed keys without pages keep their places.
template <typename T>
struct Gathered : PagedAttention<T> {
  bool in_pages;
  int all_rows;  // of all sequences

  explicit Gathered(const PagedAttention<T>& p) : PagedAttention<T>(p), in_pages(true) { count_rows(); }
  explicit Gathered(const Attention<T>& p) : PagedAttention<T>{p, nullptr, 0, 0, 0}, in_pages(false) { count_rows(); }

  void count_rows() { all_rows = to_int(int64_t(sequences()) * this->seq_kv, "prefill_attention: the copy of k"); }

  // How many sequences of seq_kv keys the copy has room for.
  int sequences() const { return this->packed && !in_pages ? 1 : this->batch; }
  int blocks() const { return this->packed ? 1 : this->batch; }
  int slots() const { return this->packed ? all_rows : this->seq_kv; }

  MINFER_EITHER Sequence sequence(int number) const {
    if (!in_pages) return Attention<T>::sequence(number);
    Sequence s = PagedAttention<T>::sequence(number);
    if (this->packed) s.first_kv = number * this->seq_kv;  //@ first_row
    return s;
  }

  // The rows of `dim` columns that begin at `begin`.
  Rows<const T> rows_at(const T* begin, int dim) const {
    const int64_t of_key = int64_t(this->kv_heads) * dim;
    return {begin, this->packed ? 0 : this->seq_kv * of_key, of_key, dim};
  }
};

// The same with the scales of keys and of values, which the copy is without.
template <typename T>
struct ScaledCopy : Gathered<T> {
  const float* scales;
};

// The keys of a sequence that any of its queries sees, from a multiple of `block_n` on, because the kernels that read the copy
// multiply whole blocks. Packed keys without pages count as one sequence.
template <typename P>
__device__ Span keys_to_gather(const P& p, int number, int block_n) {
  if constexpr (!P::kPaged)
    if (p.packed) return {0, min(p.kv_seqlens[p.batch], p.seq_kv)};
  const Sequence s = p.sequence(number);
  if (s.queries == 0) return {0, 0};
  return {p.span(s, 0).begin / block_n * block_n, s.keys};  //@ whole_blocks
}

// Two e4m3 numbers, in the lower half of `two`, as T, which is exact.
template <typename T>
__device__ uint32_t pair_of(uint32_t two) {
  const uint32_t halves = e4m3_to_halves(two);
  if constexpr (std::is_same_v<T, Half>) return halves;
  const float2 values = to_floats(reinterpret_cast<const __half2&>(halves));
  uint32_t pair;
  round_to(reinterpret_cast<typename Vector<T>::Pair&>(pair), values.x, values.y);
  return pair;
}

// A piece is 8 numbers. It is read as it is, and written in T.
template <typename From>
using Piece = std::conditional_t<sizeof(From) == 1, uint2, uint4>;

template <typename T>
__device__ uint4 in_dtype(const uint4& piece) {
  return piece;
}
template <typename T>
__device__ uint4 in_dtype(const uint2& piece) {
  return {pair_of<T>(piece.x), pair_of<T>(piece.x >> 16), pair_of<T>(piece.y), pair_of<T>(piece.y >> 16)};
}

// Copies the rows of all heads of `keys` keys to rows side by side from `to` on. offsets[key] is where a key begins in `from`.
// Threads side by side copy pieces side by side. A thread has the same piece of each of its rows.
template <int kDim, typename T, typename From>
__device__ void gather_rows(T* to, const Rows<const From>& from, const int64_t* offsets, int keys, int heads) {
  constexpr int kPieces = kDim / 8, kStep = kGatherers / kPieces;
  static_assert(kGatherers % kPieces == 0);
  const int count = keys * heads, column = threadIdx.x % kPieces * 8;
  const int keys_of_step = kStep / heads, heads_of_step = kStep % heads;
  int row = threadIdx.x / kPieces, key = row / heads, head = row % heads;
  while (row < count) {
    Piece<From> pieces[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (row + i * kStep < count) {
        const From* begin = from.begin + offsets[key] + head * from.of_head;  //@ row_of_head
        pieces[i] = *reinterpret_cast<const Piece<From>*>(begin + column);
      }
      key += keys_of_step, head += heads_of_step;
      if (head >= heads) head -= heads, ++key;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, row += kStep)
      if (row < count) *reinterpret_cast<uint4*>(to + row * kDim + column) = in_dtype<T>(pieces[i]);
  }
}

// A block copies 32 keys and values of one sequence, for which the grid has `blocks_of_one` blocks.
template <int kDim, int kDimV, typename P, typename T = typename P::Element>
__global__ void __launch_bounds__(kGatherers)
    gather(const __grid_constant__ P p, T* k, T* v, int blocks_of_one, int block_n) {
  __shared__ int64_t offsets_of_k[kKeysOfGatherer];
  __shared__ int64_t offsets_of_v[kKeysOfGatherer];
  let_next_start();
  const int number = blockIdx.x / blocks_of_one, first = blockIdx.x % blocks_of_one * kKeysOfGatherer;
  const Span needed = keys_to_gather(p, number, block_n);
  if (first < needed.begin || first >= needed.end) return;  // block_n is a multiple of the keys of a block
  const int keys = min(needed.end - first, kKeysOfGatherer);
  if (threadIdx.x < keys) {
    const int key = first + threadIdx.x;
    if constexpr (P::kPaged) {
      const int place = p.place_of(number, key);  //@ page_of_key
      offsets_of_k[threadIdx.x] = p.at_place(p.k, place, 0) - p.k.begin;
      offsets_of_v[threadIdx.x] = p.at_place(p.v, place, 0) - p.v.begin;
    } else {
      offsets_of_k[threadIdx.x] = p.k.at(number, key, 0) - p.k.begin;
      offsets_of_v[threadIdx.x] = p.v.at(number, key, 0) - p.v.begin;
    }
  }
  __syncthreads();  //@ offsets_there
  const int64_t row = (int64_t(number) * p.seq_kv + first) * p.kv_heads;
  gather_rows<kDim>(k + row * kDim, p.k, offsets_of_k, keys, p.kv_heads);
  gather_rows<kDimV>(v + row * kDimV, p.v, offsets_of_v, keys, p.kv_heads);
}

// As CopyByThread, but it waits for `gather` first.
struct CopyGathered {
  static constexpr bool kStartsEarly = true;

  template <typename Tile, typename P>
  __device__ void operator()(const Tile& tile, const P& p, const AttentionMaps& maps, int log_packed) const {
    if (threadIdx.x != kWarpgroups * 128) return;
    wait_for_previous();
    copy_items(tile, p, maps, log_packed);
  }
};

namespace no_maximum {

// v06's `produce`, but it waits for the copy before it reads keys.
template <typename T, int kDim, int kDimV>
__device__ void produce(const TilesOf<T, kDim, kDimV>& tile, const Gathered<T>& p, const AttentionMaps& maps, Slots* slots,
                        const Order& order, unsigned* drawn) {
  using Tile = TilesOf<T, kDim, kDimV>;
  tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Phases keys, values;
  Ring<kSlots> slot;
  Ring<Tile::kTilesOfQ> of_q;
  bool first = true;
  const auto take = [&] {
    Work w{-1, 0, 0, {}, 0, 0};
    for (int index = 0; !w.exists() && index < order.pieces();) {
      index = first ? blockIdx.x : gridDim.x + atomicInc(drawn, order.pieces() - 1);
      first = false;
      if (index < order.pieces()) w = work_of<Tile::kBlockN>(p, index, order);
    }
    w.blocks = max(w.blocks, 1);
    barrier_wait(slots->empty + slot.stage, slot.parity ^ 1);
    slots->work[slot.stage] = w;
    barrier_arrive(slots->full + slot.stage);
    slot.advance();
    return w;
  };
  Work w = take();
  wait_for_previous();
  while (w.exists()) {
    tile.load_q(p, maps, w, of_q.stage, of_q.parity);
    of_q.advance();
    tile.load_keys(p, maps, w, w.blocks - 1, 0, keys.parity(0));
    keys.flip(0);
    int stage = 0;
#pragma unroll 1
    for (int block = w.blocks - 1; block > 0; --block, stage ^= 1) {
      tile.load_keys_and_values(p, maps, w, block - 1, stage ^ 1, keys.parity(stage ^ 1), values.parity(stage));
      keys.flip(stage ^ 1), values.flip(stage);
    }
    const Work next = take();
    tile.load_values(p, maps, w, 0, stage, values.parity(stage));
    values.flip(stage);
    w = next;
  }
}

// As Consumer::attend, but the sums are multiplied by the scale of values.
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

// `scales` are those of keys and of values. That of keys is a part of the scale of scores, so the consumers have a copy of p. Of
// this copy only the scale takes a register. With a copy in shared memory, heads of 128 spilled 40 bytes.
template <typename T, int kDim, int kDimV, bool kScaled>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Gathered<T> p, const Order order,
           const float* scales, unsigned* counters) {
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
  if constexpr (kScaled) {
    Attention<T> scaled = p;
    scaled.scale *= scales[0];  //@ scale_of_keys
    Consumer<T, kDim, kDimV, true> consumer(tile, scaled, slots);
    attend_scaled(consumer, maps, scales + 1);
  } else {
    Consumer<T, kDim, kDimV>(tile, p, slots).attend(maps);
  }
}

// Starts this kernel; `scales` is null where there are none. What it reads before it waits for the copy was there before
// `gather` began.
template <int kDim, int kDimV, bool kScaled, typename T>
void launch(const Gathered<T>& p, const float* scales) {
  constexpr int kBytes = Consumer<T, kDim, kDimV>::kBytes;
  const AttentionMaps maps = make_maps(p, TilesOf<T, kDim, kDimV>::kBlockN);
  const Order order = make_order(p, kL2Bytes);
  const auto kernel = attend<T, kDim, kDimV, kScaled>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
  STD_CUDA_CHECK(launch_early(kernel, 1, dim3(blocks), kThreads, kBytes, p.stream, maps, p, order, scales,
                              counters_of(p.stream)));
}

}  // namespace no_maximum

// Starts the kernels. p is a PagedAttention<T> or an Fp8Attention.
template <typename P>
void launch_gathered(const P& p) {
  using T = typename P::Element;
  constexpr bool kScaled = kHasScales<P>;
  STD_TORCH_CHECK(p.v_dim <= 128, "prefill_attention: this kernel needs v with a head_dim of at most 128, got ", p.v_dim);
  check_rows_in_pieces(p.k, p.dim, "prefill_attention: k"), check_rows_in_pieces(p.v, p.v_dim, "prefill_attention: v");
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    constexpr bool kDivides = kDim == kDimV && kDim % 64 == 0;  // v14's heads
    constexpr int kBlockN = no_maximum::TilesOf<T, kDim, kDimV>::kBlockN;
    static_assert(kBlockN % kKeysOfGatherer == 0 && kKeys % kKeysOfGatherer == 0);
    Gathered<T> gathered(p);
    const int64_t numbers_of_k = int64_t(gathered.all_rows) * p.kv_heads * kDim;
    const int64_t numbers_of_v = int64_t(gathered.all_rows) * p.kv_heads * kDimV;
    const auto scratch = scratch_words((numbers_of_k + numbers_of_v) / 2);
    T *k = static_cast<T*>(scratch.mutable_data_ptr()), *v = k + numbers_of_k;
    gathered.k = gathered.rows_at(k, kDim), gathered.v = gathered.rows_at(v, kDimV);
    const Division division = kDivides ? divide_keys(gathered) : Division{0, {}, 1};
    if (gathered.all_rows > 0) {
      const int blocks_of_one = (p.seq_kv + kKeysOfGatherer - 1) / kKeysOfGatherer;
      const int blocks = to_int(int64_t(gathered.sequences()) * blocks_of_one, "prefill_attention: the copy of k");
      const int block_n = division.most > 1 ? kKeys : kBlockN;
      gather<kDim, kDimV, P><<<blocks, kGatherers, 0, p.stream>>>(p, k, v, blocks_of_one, block_n);
    }
    const float* scales = nullptr;
    if constexpr (kScaled) scales = p.scales;
    if constexpr (kDivides) {
      if (division.most > 1) {
        if constexpr (kScaled) launch_divided<kDim>(ScaledCopy<T>{gathered, scales}, division, kKeys, CopyGathered{});
        else launch_divided<kDim>(gathered, division, kKeys, CopyGathered{});
        return;
      }
    }
    no_maximum::launch<kDim, kDimV, kScaled>(gathered, scales);
  };
  if (p.dim == 64) launch_dims.template operator()<64, 64>();
  else if (p.dim == 96) launch_dims.template operator()<96, 96>();
  else if (p.dim == 128) launch_dims.template operator()<128, 128>();
  else launch_dims.template operator()<192, 128>();
}

}  // namespace minfer
