// v17_wide_parts: v13 with keys in parts, for few queries over many keys, whose tiles leave multiprocessors idle.
// Idea: v14's, for heads of 192 and 256, and of 192 with values of 128. A tile's blocks of keys are divided into parts, which
// thread blocks take as v13 takes tiles. A part leaves its sums in memory in fp32, not divided, and a second kernel adds up the
// parts of each row in their order. A part is a tile with fewer blocks of keys, so v13's loops, turns and ring stay as they
// are. Sums go to memory from registers, and nothing is written over q. Where whole tiles take no longer, v13's kernel is
// launched.
// Expected: 1 x 33 queries x 6352 keys, causal, 16/8 heads of 256, has 16 tiles of 50 blocks. On an H200 each has 8 parts of 6
// or 7 blocks. By the model of v13's times (attention_times.py), both warpgroups take 3.3 us for a block, 23 for 7 blocks. The
// launch, the first copies and the stores take 16, and the second kernel 3: it reads 4 MB, which are in L2. 42 us; v13 takes
// 130, and FlashAttention-2, which divides keys, 45.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=64, seq_kv=8192, heads=16, kv_heads=8, head_dim=256): 207.0
//   TFLOP/s cold; 121.2 % of torch.
#include "add_parts.cuh"
#include "wide_kernel.cuh"

namespace minfer {

// A part of a tile: a range of the tile's blocks of keys. Its results are in place `slot` of the memory.
struct Part : Work {
  int slot;
};

// The parts of all tiles: the first part of each, the second of each, and so on, so that tiles that share keys read them from
// L2 at the same time. The last parts of a short tile do not exist.
template <typename P>
struct AllParts {
  const P& p;
  const Order& order;
  const int most;

  __device__ int count() const { return order.pieces() * most; }
  __device__ Part operator[](int index) const {
    Part part{work_of<kKeys>(p, index % order.pieces(), order), index};
    const int number = index / order.pieces(), whole = part.blocks, parts = parts_of(whole, most, kLeastWide);
    if (number >= parts) {
      part.number = -1;
      return part;
    }
    const int begin = whole * number / parts;
    part.blocks = whole * (number + 1) / parts - begin;  //@ behind_last
    part.first_block += begin;                           //@ first_block
    return part;
  }
};
template <typename P>
AllParts(const P&, const Order&, int) -> AllParts<P>;

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend_to_parts(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
                    int most, const Parts results, unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideTiles<T, kDim, kDimV, Part> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kFewRegisters>();
    if (threadIdx.x == kConsumers * 128) produce(tile, p, maps, AllParts{p, order, most}, counters);
    return;
  }
  registers_up<kMostRegisters>();
  WideConsumer<T, kDim, kDimV, Part> consumer(tile, p);
  const auto& rows = consumer.rows;
  consumer.attend_each(maps, [&](const Part& part) {
    leave_sums(results, part.slot, rows.online, rows.factor, rows.out,
               [&](int row) { return part.row0 + row < part.s.queries; });
  });
}

// Adds up the parts of each row of a tile, and writes the rows that exist; 0 for rows that saw no key. A thread has four
// columns of a row.
template <typename T, int kDimV>
__global__ void __launch_bounds__(kCombineThreads)
    add_parts_of_rows(const __grid_constant__ Attention<T> p, const Order order, int most, const Parts results) {
  constexpr int kThreadsOfRow = kDimV / 4, kBlocks = kBlockM * kThreadsOfRow / kCombineThreads;
  const int index = blockIdx.x / kBlocks, thread = blockIdx.x % kBlocks * kCombineThreads + threadIdx.x;
  const int row = thread / kThreadsOfRow, column = thread % kThreadsOfRow * 4;
  const Work w = work_of<kKeys>(p, index, order);
  wait_for_previous();
  const int query = w.row0 + row, batch = p.packed ? 0 : w.number;
  if (!w.exists() || query >= p.rows(w.s)) return;
  const int count = query < w.s.queries ? parts_of(w.blocks, most, kLeastWide) : 0;  //@ parts_there
  const auto slot = [=](int part) { return part * order.pieces() + index; };         //@ slot
  add_parts_of_row(p, results, row, column, count, slot, w, batch, query, w.head);
}

template <typename T>
void launch_parts(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim > 128, "prefill_attention: this kernel takes heads of 192 and 256, got ", p.dim);
  Order order = make_order(p, kL2Bytes);
  if (p.packed) order.tiles = most_tiles(p, kBlockM);
  const int most = count_parts(order.pieces(), most_blocks(p, kBlockM, kKeys), multiprocessors(), kLeastWide, kBesidesWide);
  if (most == 1) return launch(p);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    using Tile = WideTiles<T, kDim, kDimV, Part>;
    const int64_t slots = int64_t(order.pieces()) * most;
    const Tensor memory = scratch_words(Parts::words(slots, kBlockM, kDimV));
    const Parts results = Parts::at(memory.mutable_data_ptr(), slots, kBlockM, kDimV);
    const AttentionMaps maps = make_maps(p, kKeys, kRowsOfWarp, Tile::kValues);
    const auto kernel = attend_to_parts<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
    const int blocks = static_cast<int>(std::min<int64_t>(slots, multiprocessors()));
    kernel<<<blocks, kThreads, Tile::kBytes, p.stream>>>(maps, p, order, most, results, counters_of(p.stream));
    const int adding = order.pieces() * (kBlockM * kDimV / (4 * kCombineThreads));
    STD_CUDA_CHECK(launch_early(add_parts_of_rows<T, kDimV>, 1, dim3(adding), kCombineThreads, 0, p.stream, p, order, most,
                                results));
  };
  if (p.dim == 256) launch_dims.template operator()<256, 256>();
  else p.v_dim == 192 ? launch_dims.template operator()<192, 192>() : launch_dims.template operator()<192, 128>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v17_wide_parts, minfer::launch_parts)
