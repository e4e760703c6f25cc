// v05_scored: v03's mainloop and split with a window of keys, a soft cap, sinks, trees of new tokens, pages of any power of two
// and up to 16 new tokens. It is called only where one of them is given.
// Idea: each sequence begins with the first unit of 16 keys that the window reaches. Units before it are neither copied
// nor looked up in the page table, and a launch has blocks for as many keys as a window has. A sink is a score without
// a value: it joins the sum of exponentials once, when all parts of a row are added. Each lane looks up the page of one key of a
// unit, so that a page may have fewer slots than a unit has keys. A tree is a word for each query, in shared memory, that is read
// only in the units that have new tokens.
// Expected: v03's time for as many keys as are seen. With a soft cap also a tanh for each score, hidden behind reads of
// memory.
#include "cuda/counters.cuh"
#include "scored.cuh"

namespace minfer {

constexpr int kLeast = 128;  // keys of a part: two units a warp

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    scored(Decode<typename Shape::T, typename Shape::KV> p, const Scoring scoring, Parts parts, int splits,
           unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  __shared__ unsigned seen_new[kMostNew];
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
  const int number = blockIdx.z, item = blockIdx.z * gridDim.y + blockIdx.y;
  const int kv_head = blockIdx.y / tiles, row0 = blockIdx.y % tiles * Shape::kRows;
  ScoredWarp<Shape> warp(p, scoring, shared, seen_new);
  warp.load_q(number, kv_head, row0);
  const int keys = p.keys(number), front = warp.first_key(p, scoring, keys) / kUnit;
  const int units = (keys + kUnit - 1) / kUnit, each = (units - front + splits - 1) / splits;
  const int begin = min(front + int(blockIdx.x) * each, units);
  const Piece piece{number, kv_head, row0, keys, begin, min(begin + each, units)};
  warp.start(piece);
  if (threadIdx.x < p.new_tokens) seen_new[threadIdx.x] = scoring.seen_new(p, number, threadIdx.x);
  __syncthreads();  //@ seen_there
  warp.run(piece);
  const int rows = min(Shape::kRows, p.rows() - row0);
  warp.leave(shared, stats[threadIdx.x / 32], rows);
  const int first = item * splits;
  const auto store = [&](int row, int column, const Merged& all) {
    const int head = kv_head * p.group() + (row0 + row) % p.group();
    store_out(p, number, kv_head, row0 + row, column, divided(all, scoring, head, p.scale_of_v()));  //@ sink
  };
  add_warps<Shape>(shared, stats, rows, [&](int row, int column, const Merged& all) {
    if (splits == 1) return store(row, column, all);
    parts.sums_at(first + blockIdx.x, row, column) = all.sums;
    if (column == 0) parts.stats_at(first + blockIdx.x, row) = {all.base, all.total};
  });
  // gridDim.x is `splits`, with which this would take 19 registers more.
  if (splits == 1 || !is_last(counters + item, gridDim.x)) return;
  constexpr int kPieces = Shape::kVDim / 4;
  for (int i = threadIdx.x; i < rows * kPieces; i += Shape::kThreads) {
    const int row = i / kPieces, column = i % kPieces * 4;
    store(row, column, merge_parts<Shape::kBatch>(parts, row, column, splits, [=](int part) { return first + part; }));
  }
}

template <typename Shape, typename T, typename KV>
void launch_shape(const Decode<T, KV>& p, const Scoring& scoring, int most, int tiles, int64_t items) {
  const int splits = items > kMostCounters ? 1 : split_count(items, Shape::kResident * multiprocessors(), most, kLeast);
  STD_TORCH_CHECK(p.batch <= 65535 && p.kv_heads * tiles <= 65535 && items * splits < INT_MAX,
                  "decode_attention: more sequences and heads than a launch has blocks");
  const int rows = std::min(Shape::kRows, p.rows());
  const Tensor memory = scratch_words(splits > 1 ? Parts::words(items * splits, rows, Shape::kVDim) : 0);
  const Parts parts = Parts::at(memory.mutable_data_ptr(), items * splits, rows, Shape::kVDim);
  allow_shared(scored<Shape>, Shape::kBytes);
  scored<Shape><<<dim3(splits, p.kv_heads * tiles, p.batch), Shape::kThreads, Shape::kBytes, p.stream>>>(
      p, scoring, parts, splits, splits > 1 ? counters_of(p.stream) : nullptr);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p, const Scoring& scoring) {
  // The most keys in the units that one sequence's queries see. A window may begin within a unit, which adds up to one
  // unit.
  const int64_t wide = int64_t(scoring.window) + p.new_tokens + kUnit;
  const int most = scoring.window > 0 && wide < p.most ? static_cast<int>(wide) : p.most;
  for_scored_shape(p, [&]<typename Shape>() {
    const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
    const int64_t items = int64_t(p.batch) * p.kv_heads * tiles;
    if constexpr (kMostShared >= Shape::Whole::kBytes + (4 << 10)) {
      const int64_t splits = multiprocessors() / items;  // as in v03
      if (splits > 0 && most / splits >= 2 * kUnit * Shape::Whole::kWarps)
        return launch_shape<typename Shape::Whole>(p, scoring, most, tiles, items);
    }
    launch_shape<Shape>(p, scoring, most, tiles, items);
  });
}

}  // namespace minfer

MINFER_SCORED_DECODE(decode_attention_v05_scored, minfer::launch)
