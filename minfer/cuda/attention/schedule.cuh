// Divides the work of a batch into equal shares. Each block finds its share by itself, from the lengths in device memory.
//
// An item is a key-value head of a sequence, or one tile of its query rows if it has several. It costs one step for each unit
// of keys and kSetup more; sequences without keys cost nothing. The steps of all items form one list. Block i of n has the
// steps from total * i / n to total * (i + 1) / n, rounded down: a pure function of the lengths and of n.
#pragma once

#include "cuda/attention/parts.cuh"

namespace minfer {

// A step is a unit of kUnit keys. The set-up of an item counts as kSetup_ more steps before its units. A share has at least
// kLeast_ steps: with fewer steps in all, fewer blocks work.
template <int kUnit_, int kSetup_, int kLeast_>
struct Steps {
  static constexpr int kUnit = kUnit_, kSetup = kSetup_, kLeast = kLeast_;

  // The steps of one item of a sequence.
  __device__ static int64_t of(const Cached& p, int number) {
    const int keys = p.keys(number);
    return keys > 0 ? (keys + kUnit - 1) / kUnit + kSetup : 0;
  }
};

// The work of a block, as pieces: a piece is a range of units of one item.
template <typename Steps>
struct Share {
  static constexpr int kSetup = Steps::kSetup;
  int64_t total, blocks;  // all steps, and how many blocks share them
  int64_t at, end;        // the steps of this block that are left
  int worker;             // which of the blocks this is
  int number, items;      // the sequence of step `at`, or an earlier one that has no steps left; items of a sequence
  int64_t before;         // steps of all sequences before it
  // The current piece: its item, its units [begin, stop), and the blocks with pieces of the same item: `count` from `first` on.
  int item, keys, begin, stop, first, count;

  __device__ int owner(int64_t step) const { return static_cast<int>(((step + 1) * blocks - 1) / total); }

  // Finds the next piece; false when the share has none left.
  __device__ bool next(const Cached& p) {
    while (at < end) {
      const int64_t steps = Steps::of(p, number), behind = before + steps * items;
      if (at >= behind) {
        before = behind, ++number;
        continue;
      }
      item = static_cast<int>((at - before) / steps);
      const int64_t begin_of_item = before + item * steps, end_of_item = begin_of_item + steps;
      const int64_t upto = end < end_of_item ? end : end_of_item;
      begin = max(0, static_cast<int>(at - begin_of_item) - kSetup);
      stop = static_cast<int>(upto - begin_of_item) - kSetup;
      at = upto;
      if (begin >= stop) continue;  // only steps for the set-up
      keys = p.keys(number);
      first = begin == 0 ? worker : owner(begin_of_item + kSetup);
      count = (upto == end_of_item ? worker : owner(end_of_item - 1)) - first + 1;
      return true;
    }
    return false;
  }
};

// The share of worker number `worker` of `workers`; a worker is a block or a cluster. All kThreads threads of the block call
// it. Each thread sums the steps of some of the sequences, and a prefix sum over the threads follows.
template <typename Steps, int kThreads>
__device__ Share<Steps> share_of_block(const Cached& p, int tiles, int worker, int workers) {
  __shared__ int64_t of_warp[kThreads / 32];
  __shared__ int64_t found_before;
  __shared__ int found;
  const int lane = threadIdx.x % 32, each = (p.batch + kThreads - 1) / kThreads;
  const int first = min(p.batch, int(threadIdx.x) * each), last = min(p.batch, first + each);
  Share<Steps> s{};
  s.worker = worker, s.items = p.kv_heads * tiles;
  int64_t mine = 0;
  for (int number = first; number < last; ++number) mine += Steps::of(p, number) * s.items;
  int64_t upto = mine;  // the steps of this thread and of those before it
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffff, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) of_warp[threadIdx.x / 32] = upto;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < int(threadIdx.x) / 32) upto += of_warp[warp];
    s.total += of_warp[warp];
  }
  const int64_t most = s.total / Steps::kLeast;
  s.blocks = most < 1 ? 1 : most < workers ? most : workers;
  if (worker >= s.blocks || s.total == 0) return s;
  s.at = s.total * worker / s.blocks, s.end = s.total * (worker + 1) / s.blocks;  //@ last_step
  int64_t before = upto - mine;
  if (before <= s.at && s.at < upto) {
    for (int number = first; number < last; ++number) {
      const int64_t steps = Steps::of(p, number) * s.items;
      if (s.at < before + steps) {
        found = number, found_before = before;
        break;
      }
      before += steps;
    }
  }
  __syncthreads();
  s.number = found, s.before = found_before;
  return s;
}

// Zeros for the queries of sequences without keys, which are in no share.
template <int kThreads, typename Problem>
__device__ void clear_empty(const Problem& p) {
  const int pieces = p.dim / 4, rows = p.rows() * pieces;
  for (int number = blockIdx.x; number < p.batch; number += gridDim.x) {
    if (p.keys(number) > 0) continue;  //@ no_keys
    for (int i = threadIdx.x; i < p.kv_heads * rows; i += kThreads)
      store_out(p, number, i / rows, i % rows / pieces, i % pieces * 4, float4{});
  }
}

}  // namespace minfer
