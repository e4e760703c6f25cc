// A sequence's keys split into parts: what each part leaves in memory, how parts become out, and how many there are.
#pragma once

#include <algorithm>

#include "cuda/softmax.cuh"
#include "ops/cached.h"

namespace minfer {

// The results of parts in memory, a slot for each part, for each of `rows` rows. sums, (slots, rows, dim), has the sum of
// 2^(exponent - base) times value over the part's keys. stats, (slots, rows), has the base, which is -inf where the part saw
// no key, and the sum of the exponentials 2^(exponent - base).
struct Parts {
  float* sums;
  float2* stats;
  int rows, dim;

  __device__ float* sums_of(int slot, int row) const { return sums + (int64_t(slot) * rows + row) * dim; }
  __device__ float4& sums_at(int slot, int row, int column) const {
    return *reinterpret_cast<float4*>(sums_of(slot, row) + column);
  }
  __device__ float2& stats_at(int slot, int row) const { return stats[int64_t(slot) * rows + row]; }

  // The 32-bit words that `slots` slots take. The stats come first, padded so that sums begin at a multiple of 16 bytes.
  static int64_t words(int64_t slots, int rows, int dim) { return slots * rows * (dim + 2) + 2; }
  static Parts at(void* memory, int64_t slots, int rows, int dim) {
    const int64_t front = (slots * rows * 2 + 3) / 4 * 4;
    return {static_cast<float*>(memory) + front, static_cast<float2*>(memory), rows, dim};
  }
};

// The sum of parts of a row: four columns of the sums, and the row's stats.
struct Merged {
  float4 sums{};
  float base = -INFINITY, total = 0.0f;

  // Divided by the sum of exponentials; zeros where no key was seen.
  __device__ float4 divided(float scale) const {
    const float factor = total > 0.0f ? scale / total : 0.0f;
    return {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
  }
};

// Adds `count` parts in their order, so that the bits do not depend on who adds them. It loads kBatch of them at a time, stats
// and sums together, so that it waits once for all of a batch. kInHalves: each weight is applied twice, as its square
// root, as in OnlineRows::add_in_halves.
template <int kBatch = 4, bool kInHalves = false, typename StatsOf, typename SumsOf>
__device__ Merged merge(int count, StatsOf stats_of, SumsOf sums_of) {
  const auto weight_of = [](float exponent) { return exp2_approx(kInHalves ? 0.5f * exponent : exponent); };  //@ halves
  const auto multiply = [](float4& sums, float& total, float by) {
    total *= by, sums.x *= by, sums.y *= by, sums.z *= by, sums.w *= by;
  };
  Merged all;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    float2 stats[kBatch];
    float4 more[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool there = first + i < count;
      stats[i] = there ? stats_of(first + i) : float2{-INFINITY, 0.0f};
      more[i] = there ? sums_of(first + i) : float4{};
    }
    float base = all.base;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) base = fmaxf(base, stats[i].x);
    const float zero = base_of_row(base), kept = weight_of(all.base - zero);
    all.base = base;
    multiply(all.sums, all.total, kept);
    if constexpr (kInHalves) multiply(all.sums, all.total, kept);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = weight_of(stats[i].x - zero);  //@ weight
      if constexpr (kInHalves) multiply(more[i], stats[i].y, weight);
      all.total = fmaf(weight, stats[i].y, all.total);
      all.sums.x = fmaf(weight, more[i].x, all.sums.x), all.sums.y = fmaf(weight, more[i].y, all.sums.y);
      all.sums.z = fmaf(weight, more[i].z, all.sums.z), all.sums.w = fmaf(weight, more[i].w, all.sums.w);
    }
  }
  return all;
}

// The same for parts that other blocks have written, the i-th in slot(i). The loads bypass L1, which may hold older values.
template <int kBatch = 4, bool kInHalves = false, typename SlotOf>
__device__ Merged merge_parts(const Parts& parts, int row, int column, int count, SlotOf slot) {
  return merge<kBatch, kInHalves>(count, [&](int i) { return __ldcg(&parts.stats_at(slot(i), row)); },
                                  [&](int i) { return __ldcg(&parts.sums_at(slot(i), row, column)); });
}

// Rounds and stores four columns of row `row` of the query rows that share key-value head `kv_head`. A Problem is a Cached
// with `out`, whose rows have `dim` elements of Problem::Element, and with `scale_of_v()`, the factor of the values.
template <typename Problem>
__device__ void store_out(const Problem& p, int number, int kv_head, int row, int column, float4 values) {
  using Pair = typename Vector<typename Problem::Element>::Pair;
  typename Problem::Element* to = p.out.at(number, row / p.group(), kv_head * p.group() + row % p.group()) + column;
  uint2 bits;
  round_to(reinterpret_cast<Pair&>(bits.x), values.x, values.y);
  round_to(reinterpret_cast<Pair&>(bits.y), values.z, values.w);
  *reinterpret_cast<uint2*>(to) = bits;
}

// Adds the `count` parts of rows [row0, row0 + parts.rows) of a key-value head of a sequence, the i-th in slot(i).
template <int kThreads, int kBatch, typename Problem, typename SlotOf>
__device__ void add_parts(const Problem& p, const Parts& parts, int number, int kv_head, int row0, int count, SlotOf slot) {
  const int pieces = parts.dim / 4;
  for (int i = threadIdx.x; i < min(parts.rows, p.rows() - row0) * pieces; i += kThreads) {
    const int row = i / pieces, column = i % pieces * 4;
    const Merged all = merge_parts<kBatch>(parts, row, column, count, slot);
    store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
  }
}

// Whether a block is the last of `count` to arrive; then it sees what the others wrote before. The counter wraps to zero. The
// fence of one thread after a barrier covers the writes of its block.
__device__ inline bool is_last(unsigned* counter, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, count - 1) == unsigned(count - 1);  //@ last_block
    __threadfence();
  }
  __syncthreads();
  return last;
}

constexpr int kCombineThreads = 128;

// Adds parts up: a block takes the rows [row0, row0 + parts.rows) of a key-value head of a sequence, whose parts are in
// `splits` adjacent slots.
template <typename Problem>
__global__ void __launch_bounds__(kCombineThreads) combine(Problem p, Parts parts, int splits) {
  const int tiles = (p.rows() + parts.rows - 1) / parts.rows, number = blockIdx.y;
  const int kv_head = blockIdx.x / tiles, row0 = blockIdx.x % tiles * parts.rows;
  const int first = (blockIdx.y * gridDim.x + blockIdx.x) * splits;
  add_parts<kCombineThreads, 8>(p, parts, number, kv_head, row0, splits, [=](int part) { return first + part; });  //@ part
}

// How many parts each of `items` is split into, where `at_once` blocks run at once: a pure function. As many as all run at
// once: any number of equal blocks that starts together ends together, because memory is what they share. A part has at least
// `least` of the `most` keys.
inline int split_count(int64_t items, int at_once, int most, int least) {
  const int limit = std::clamp((most + least - 1) / least, 1, 256);
  return static_cast<int>(std::clamp<int64_t>(at_once / items, 1, limit));
}

}  // namespace minfer
