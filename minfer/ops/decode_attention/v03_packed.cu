// v03_packed: the query heads of a group, for all new tokens, are columns of mma.sync: keys and values are read once for all of
// them.
// Idea: four heads of a group fill 4 of the 8 columns of a product, which costs nothing because memory is the limit. Each warp
// has its own ring of cp.async stages of 16 keys and values, which is 8 KB for head_dim 128; warps do not synchronise until a
// piece of work is done. Keys are split as in v02_split; the last block of an item to arrive adds its parts. Few long items
// take blocks that have an SM of an H200 to themselves, with twice the warps and rings, so that an item has fewer parts.
// Expected: near the speed of memory for many long sequences of one length. An SM of an H200 needs 14 KB in
// flight, its 20 B a clock times 700 clocks of latency, and has 128 KB. With ragged lengths SMs idle, because the split is made
// for the longest possible length.
// Measured (H200, bfloat16, none, full, none, batch=16, new=1, longest=8192, heads=32, kv_heads=8, head_dim=128): 4286 GB/s
//   cold; 99.9 % of torch.
#include "cuda/counters.cuh"
#include "packed.cuh"

namespace minfer {

constexpr int kLeast = 128;  // keys of a part: two units a warp

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    packed(Decode<typename Shape::T, typename Shape::KV> p, Parts parts, int splits, unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
  const int number = blockIdx.z, item = blockIdx.z * gridDim.y + blockIdx.y;
  const int kv_head = blockIdx.y / tiles, row0 = blockIdx.y % tiles * Shape::kRows;
  // The pages are not known before the length is. The table's row is brought to L2 meanwhile.
  if (p.page_table && int(threadIdx.x) * 32 * p.slots < p.most)
    prefetch_l2(p.page_table + number * p.table_stride + threadIdx.x * 32);
  //@ Scopes<Timeline> scopes(timeline); scopes.begin();
  PackedWarp<Shape> warp(p, shared);
  warp.load_q(number, kv_head, row0);
  const int keys = p.keys(number), units = (keys + kUnit - 1) / kUnit;
  const int each = (units + splits - 1) / splits, begin = min(int(blockIdx.x) * each, units);
  const Piece piece{number, kv_head, row0, keys, begin, min(begin + each, units)};
  warp.start(piece);
  warp.run(piece);
  //@ scopes.end(kKeys), scopes.begin();
  const int rows = min(Shape::kRows, p.rows() - row0);
  warp.leave(shared, stats[threadIdx.x / 32], rows);
  const int first = item * splits;
  add_warps<Shape>(shared, stats, rows, [&](int row, int column, const Merged& all) {
    if (splits == 1) return store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
    parts.sums_at(first + blockIdx.x, row, column) = all.sums;
    if (column == 0) parts.stats_at(first + blockIdx.x, row) = {all.base, all.total};
  });
  //@ scopes.end(kMerge), scopes.begin();
  // gridDim.x equals `splits`, and saves 16 registers (sm_90a).
  if (splits > 1 && is_last(counters + item, gridDim.x))
    add_parts<Shape::kThreads, Shape::kBatch>(p, parts, number, kv_head, row0, splits, [=](int part) { return first + part; });
  //@ scopes.end(kCombine);
}

template <typename Shape, typename T, typename KV>
void launch_shape(const Decode<T, KV>& p, int tiles, int64_t items) {
  const int splits = items > kMostCounters ? 1 : split_count(items, Shape::kResident * multiprocessors(), p.most, kLeast);
  STD_TORCH_CHECK(p.batch <= 65535 && p.kv_heads * tiles <= 65535 && items * splits < INT_MAX,
                  "decode_attention: more sequences and heads than a launch has blocks");
  const int rows = std::min(Shape::kRows, p.rows());
  const Tensor memory = scratch_words(splits > 1 ? Parts::words(items * splits, rows, Shape::kVDim) : 0);
  const Parts parts = Parts::at(memory.mutable_data_ptr(), items * splits, rows, Shape::kVDim);
  allow_shared(packed<Shape>, Shape::kBytes);
  packed<Shape><<<dim3(splits, p.kv_heads * tiles, p.batch), Shape::kThreads, Shape::kBytes, p.stream>>>(
      p, parts, splits, splits > 1 ? counters_of(p.stream) : nullptr);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  for_shape(p, [&]<typename Shape>() {
    const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
    const int64_t items = int64_t(p.batch) * p.kv_heads * tiles;
    if constexpr (kMostShared >= Shape::Whole::kBytes + (4 << 10)) {
      // Where a block for each SM has an item or a part of one, with two units or more for each of its warps.
      const int64_t splits = multiprocessors() / items;
      if (splits > 0 && p.most / splits >= 2 * kUnit * Shape::Whole::kWarps)
        return launch_shape<typename Shape::Whole>(p, tiles, items);  //@ whole
    }
    launch_shape<Shape>(p, tiles, items);
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v03_packed, minfer::launch)
