// v07_early: v03_packed with launches that begin while the previous one still runs.
// Idea: in a decoder's step attention over a short cache takes a few microseconds, and its launch delays it by as many. Here
// its blocks start before the previous launch ends (programmatic dependent launch) and bring the page table to the L2. The next
// launch may start its own blocks before this one ends: those of a product begin to read its weights.
// Expected: 2 us less than v03_packed after another kernel (H100, batch 1, 1024 keys).
#include "cuda/counters.cuh"
#include "cuda/dependent.cuh"
#include "packed.cuh"

namespace minfer {

constexpr int kLeast = 128;  // keys of a part: two units a warp

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    early(Decode<typename Shape::T, typename Shape::KV> p, Parts parts, int splits, unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  let_next_start();
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
  const int number = blockIdx.z, item = blockIdx.z * gridDim.y + blockIdx.y;
  const int kv_head = blockIdx.y / tiles, row0 = blockIdx.y % tiles * Shape::kRows;
  // The number of pages follows from the length. While that is loaded, the table's row is brought to the L2.
  if (p.page_table && int(threadIdx.x) * 32 * p.slots < p.most)
    prefetch_l2(p.page_table + number * p.table_stride + threadIdx.x * 32);
  wait_for_previous();
  PackedWarp<Shape> warp(p, shared);
  warp.load_q(number, kv_head, row0);
  const int keys = p.keys(number), units = (keys + kUnit - 1) / kUnit;
  const int each = (units + splits - 1) / splits, begin = min(int(blockIdx.x) * each, units);
  const Piece piece{number, kv_head, row0, keys, begin, min(begin + each, units)};
  warp.start(piece);
  warp.run(piece);
  const int rows = min(Shape::kRows, p.rows() - row0);
  warp.leave(shared, stats[threadIdx.x / 32], rows);
  const int first = item * splits;
  add_warps<Shape>(shared, stats, rows, [&](int row, int column, const Merged& all) {
    if (splits == 1) return store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
    parts.sums_at(first + blockIdx.x, row, column) = all.sums;
    if (column == 0) parts.stats_at(first + blockIdx.x, row) = {all.base, all.total};
  });
  // gridDim.x equals `splits`, and saves 16 registers (sm_90a).
  if (splits > 1 && is_last(counters + item, gridDim.x))
    add_parts<Shape::kThreads, Shape::kBatch>(p, parts, number, kv_head, row0, splits, [=](int part) { return first + part; });
}

template <typename Shape, typename T, typename KV>
void launch_shape(const Decode<T, KV>& p, int tiles, int64_t items) {
  const int splits = items > kMostCounters ? 1 : split_count(items, Shape::kResident * multiprocessors(), p.most, kLeast);
  STD_TORCH_CHECK(p.batch <= 65535 && p.kv_heads * tiles <= 65535 && items * splits < INT_MAX,
                  "decode_attention: more sequences and heads than a launch has blocks");
  const int rows = std::min(Shape::kRows, p.rows());
  const Tensor memory = scratch_words(splits > 1 ? Parts::words(items * splits, rows, Shape::kVDim) : 0);
  const Parts parts = Parts::at(memory.mutable_data_ptr(), items * splits, rows, Shape::kVDim);
  allow_shared(early<Shape>, Shape::kBytes);
  const dim3 blocks(splits, p.kv_heads * tiles, p.batch);
  STD_CUDA_CHECK(launch_early(early<Shape>, 1, blocks, Shape::kThreads, Shape::kBytes, p.stream, p, parts, splits,
                              splits > 1 ? counters_of(p.stream) : nullptr));
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
        return launch_shape<typename Shape::Whole>(p, tiles, items);
    }
    launch_shape<Shape>(p, tiles, items);
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v07_early, minfer::launch)
