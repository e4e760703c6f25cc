// v14_key_parts: v07 with keys in parts, for few queries over many keys: their items fill few waves, and the last one badly.
// Idea: an item's blocks of keys are divided into parts, which thread blocks take as items (Flash-Decoding, Dao et al., 2023).
// A part leaves its sums in memory in fp32, not divided, with the base and the sum of its exponentials. A second kernel adds up
// the parts of each row in their order, and rounds once. So the bits do not depend on who takes a part. The host chooses how
// many parts an item has at most, from the shape (key_parts.h). The GPU, which knows the lengths, divides the keys that the
// item's own rows see. Where whole items take no longer, v07's kernel is launched.
// Expected: 1 x 47 queries x 55343 keys, causal, 32/8 heads of 128, has 16 items. On an H200 each has 8 parts of 109 blocks of
// keys. The 226 MB of keys and values would take 53 us at 4.3 TB/s. But by the model of v07's times (attention_times.py) both
// warpgroups take 1.1 us for a block: 120 us, and 17 for the first copies, the stores and the second kernel. 137 us; v06 takes
// 533, and FlashAttention-2, which divides keys, 220. 1 x 110 x 29456 with 16/8 heads: 80 us, against 295 and 112.
#include "cuda/attention/parts.cuh"
#include "cuda/dependent.cuh"
#include "key_parts.h"
#include "short_kernel.cuh"

namespace minfer {

// A part of an item: a range of the item's blocks of keys. Its results are in place `slot` of the memory.
struct Part : Item {
  int slot;
};

// How many parts an item has that sees `blocks` of keys. Each has at least kLeastBlocks, unless it is the only one.
__device__ inline int parts_of(int blocks, int most) { return blocks > 0 ? min(max(blocks / kLeastBlocks, 1), most) : 0; }

// The parts of all items: the first part of each, the second of each, and so on, so that items that share keys read them from L2
// at the same time. The last parts of a short item do not exist.
template <typename P>
struct AllParts {
  const P& p;
  const Order& order;
  const int log_packed, most;

  __device__ int count() const { return order.pieces() * most; }
  __device__ Part operator[](int index) const {
    Part part{item_of(p, index % order.pieces(), order, log_packed), index};
    const Span whole = part.loaded;
    const int number = index / order.pieces(), blocks = whole.end - whole.begin, parts = parts_of(blocks, most);
    if (number >= parts) {
      part.w.number = -1;
      return part;
    }
    part.loaded.begin = whole.begin + blocks * number / parts;  //@ first_block
    part.loaded.end = whole.begin + blocks * (number + 1) / parts;  //@ behind_last
#pragma unroll
    for (Span& seen : part.seen)  // an empty one lies at an end of `loaded`
      seen = {min(max(seen.begin, part.loaded.begin), part.loaded.end), min(max(seen.end, part.loaded.begin), part.loaded.end)};
    return part;
  }
};
template <typename P>
AllParts(const P&, const Order&, int, int) -> AllParts<P>;

template <typename T, int kDim>
struct PartConsumer : Consumer<T, kDim, Part> {
  using Consumer<T, kDim, Part>::Consumer;
  using Consumer<T, kDim, Part>::factor, Consumer<T, kDim, Part>::log_packed, Consumer<T, kDim, Part>::online;
  using Consumer<T, kDim, Part>::out;

  // Writes the sums of the rows that have a query, zeros for those that saw no key of the part.
  __device__ void leave(const Parts& results, const Part& part) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(online.sum[r]);
      const int row = threadIdx.x / 32 * kRowsOfWarp + lane / 4 + r * 8;
      if (part.w.row0 + (row >> log_packed) >= part.w.s.queries) continue;
      const bool any = online.base[r] != -INFINITY;  //@ no_key
      if (lane % 4 == 0) results.stats_at(part.slot, row) = {online.base[r] * factor, any ? total : 0.0f};
      float* to = results.sums_of(part.slot, row) + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
        *reinterpret_cast<float2*>(to + j * 8) = any ? float2{out[j * 4 + r * 2], out[j * 4 + r * 2 + 1]} : float2{};
    }
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend_to_parts(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
                    int log_packed, int most, const Parts results, unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ShortTiles<T, kDim, Part> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 1) take_items(tile, AllParts{p, order, log_packed, most}, counters);
    else if (threadIdx.x == kWarpgroups * 128) copy_items(tile, p, maps, log_packed);
    return;
  }
  registers_up<kMostRegisters>();
  PartConsumer<T, kDim> consumer(tile, p, log_packed);
  consumer.attend_each([&](const Part& part) { consumer.leave(results, part); });
}

// Adds up the parts of each row of an item, and writes the rows that exist; 0 for rows that saw no key. A thread has four
// columns of a row.
template <typename T, int kDim>
__global__ void __launch_bounds__(kCombineThreads)
    add_parts_of_rows(const __grid_constant__ Attention<T> p, const Order order, int log_packed, int most,
                      const Parts results) {
  constexpr int kThreadsOfRow = kDim / 4, kRowsOfBlock = kCombineThreads / kThreadsOfRow, kBlocks = kRowsOfItem / kRowsOfBlock;
  const int index = blockIdx.x / kBlocks, row = blockIdx.x % kBlocks * kRowsOfBlock + threadIdx.x / kThreadsOfRow;
  const int column = threadIdx.x % kThreadsOfRow * 4;
  const Item item = item_of(p, index, order, log_packed);
  wait_for_previous();
  const Work& w = item.w;
  const int query = w.row0 + (row >> log_packed), head = w.head + (row & (1 << log_packed) - 1);
  const int batch = p.packed ? 0 : w.number;
  if (!w.exists() || query >= p.rows(w.s)) return;
  const int count = query < w.s.queries ? parts_of(item.loaded.end - item.loaded.begin, most) : 0;  //@ parts_there
  //@ slot
  const Merged all = merge_parts<8>(results, row, column, count, [=](int part) { return part * order.pieces() + index; });
  const float4 values = all.divided(1.0f);
  using Pair = typename Vector<T>::Pair;
  uint2 bits;
  round_to(reinterpret_cast<Pair&>(bits.x), values.x, values.y);
  round_to(reinterpret_cast<Pair&>(bits.y), values.z, values.w);
  *reinterpret_cast<uint2*>(p.out.at(batch, w.s.first_q + query, head) + column) = bits;
  if (p.lse && column == 0)
    *p.lse_at(batch, w.s, query, head) = all.total > 0.0f ? (all.base + log2f(all.total)) * kLn2 : -INFINITY;
}

// The most parts of an item: as many as the longest possible item has.
template <typename T>
int most_parts(const Attention<T>& p, const Order& order, int log_packed) {
  const int64_t queries = kRowsOfItem >> log_packed, around = int64_t(p.window) * (p.causal ? 1 : 2) + queries;
  const int64_t keys = p.window > 0 ? std::min<int64_t>(p.seq_kv, around) : p.seq_kv;
  return count_parts(order.pieces(), (keys + kKeys - 1) / kKeys, multiprocessors());
}

template <typename T>
void launch_parts(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim == 64 || p.dim == 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const int log_packed = find_log_packed(p);
  Order order = make_packed_order(p, log_packed);
  // All lengths of packed sequences together are seq_q, so that they cannot have more tiles than this.
  const int64_t queries = kRowsOfItem >> log_packed;
  if (p.packed) order.tiles = static_cast<int>((p.seq_q + p.batch * (queries - 1)) / queries);
  const int most = most_parts(p, order, log_packed);
  if (most == 1) return launch(p);
  const auto launch_dim = [&]<int kDim>() {
    constexpr int kBytes = ShortTiles<T, kDim, Part>::kBytes;
    const int64_t slots = int64_t(order.pieces()) * most;
    const Tensor memory = scratch_words(Parts::words(slots, kRowsOfItem, kDim));
    const Parts results = Parts::at(memory.mutable_data_ptr(), slots, kRowsOfItem, kDim);
    const AttentionMaps maps = make_packed_maps(p, kKeys, 1 << log_packed);
    const auto kernel = attend_to_parts<T, kDim>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = static_cast<int>(std::min<int64_t>(slots, multiprocessors()));
    kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, most, results, counters_of(p.stream));
    const int adding = order.pieces() * (kRowsOfItem * kDim / (4 * kCombineThreads));
    STD_CUDA_CHECK(launch_early(add_parts_of_rows<T, kDim>, 1, dim3(adding), kCombineThreads, 0, p.stream, p, order, log_packed,
                                most, results));
  };
  p.dim == 64 ? launch_dim.template operator()<64>() : launch_dim.template operator()<128>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v14_key_parts, minfer::launch_parts)
