// What all kernels that divide keys share: sums of a part of the keys, left in memory in fp32, and their addition. Row r of an
// item is row r % 64 of warpgroup r / 64.
#pragma once

#include "cuda/attention/parts.cuh"
#include "cuda/dependent.cuh"
#include "hopper_attention.cuh"
#include "key_parts.h"

namespace minfer {

// How many parts an item has that sees `blocks` of keys. Each has at least `least`, unless it is the only one.
__device__ inline int parts_of(int blocks, int most, int least) {
  return blocks > 0 ? min(max(blocks / least, 1), most) : 0;
}

// Writes the sums `out` of the rows for which has_query(row), zeros for those that saw no key of the part. `slot` is a
// reference: it stays in shared memory and takes no register.
template <int kCount, typename HasQuery>
__device__ void leave_sums(const Parts& results, const int& slot, const OnlineRows& online, float factor,
                           const float (&out)[kCount], HasQuery has_query) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(online.sum[r]);
    const int row = threadIdx.x / 32 * kRowsOfWarp + lane / 4 + r * 8;
    if (!has_query(row)) continue;
    const bool any = online.base[r] != -INFINITY;  //@ no_key
    if (lane % 4 == 0) results.stats_at(slot, row) = {online.base[r] * factor, any ? total : 0.0f};
    float* to = results.sums_of(slot, row) + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j)
      *reinterpret_cast<float2*>(to + j * 8) = any ? float2{out[j * 4 + r * 2], out[j * 4 + r * 2 + 1]} : float2{};
  }
}

// Whether keys and values were in fp8, so that P has the scales of both.
template <typename P>
constexpr bool kHasScales = requires(const P& p) { p.scales; };

// Adds up `count` parts of four columns of a row, the i-th in slot(i), and writes them for this query and head of w's sequence;
// 0 where the row saw no key. The scale of values multiplies the sums.
template <typename P, typename SlotOf, typename T = typename P::Element>
__device__ void add_parts_of_row(const P& p, const Parts& results, int row, int column, int count, SlotOf slot,
                                 const Work& w, int batch, int query, int head) {
  const Merged all = merge_parts<8, kHasScales<P>>(results, row, column, count, slot);
  float scale = 1.0f;
  if constexpr (kHasScales<P>) scale = p.scales[1];  //@ values_of_parts
  const float4 values = all.divided(scale);
  using Pair = typename Vector<T>::Pair;
  uint2 bits;
  round_to(reinterpret_cast<Pair&>(bits.x), values.x, values.y);
  round_to(reinterpret_cast<Pair&>(bits.y), values.z, values.w);
  *reinterpret_cast<uint2*>(p.out.at(batch, w.s.first_q + query, head) + column) = bits;
  if (p.lse && column == 0)
    *p.lse_at(batch, w.s, query, head) = all.total > 0.0f ? (all.base + log2f(all.total)) * kLn2 : -INFINITY;
}

// An upper limit of the blocks of `block_n` keys that so many adjacent queries see.
template <typename T>
int64_t most_blocks(const Attention<T>& p, int64_t queries, int block_n) {
  const int64_t around = int64_t(p.window) * (p.causal ? 1 : 2) + queries;
  const int64_t keys = p.window > 0 ? std::min<int64_t>(p.seq_kv, around) : p.seq_kv;
  return (keys + block_n - 1) / block_n;
}

// An upper limit of the tiles of so many queries in packed sequences, whose lengths add up to seq_q.
template <typename T>
int most_tiles(const Attention<T>& p, int64_t queries) {
  return static_cast<int>((p.seq_q + p.batch * (queries - 1)) / queries);
}

}  // namespace minfer
