// v02_split: keys are split over blocks, and a second kernel adds up the parts in their order.
// Idea: one sequence has as many blocks as the GPU needs (Flash-Decoding, Dao et al., 2023). Lanes that share the row of a key
// load 16 bytes each, so that loads are coalesced, and a group of lanes loads four keys at once; each group has its own softmax
// until the end.
// Expected: for a batch of one, where v01 has 32 blocks, near the speed of the L2: each of a group's four heads still reads all
// keys. Where the L2 does not keep them for the next head, the rate of useful bytes is a quarter of the memory's.
// Measured (H200, bfloat16, none, full, none, batch=16, new=1, longest=8192, heads=32, kv_heads=8, head_dim=128): 1598 GB/s
//   cold; 37.2 % of torch.
#include "cuda/attention/parts.cuh"
#include "cuda/counters.cuh"
#include "elements.cuh"

namespace minfer {

constexpr int kThreads = 128, kAtOnce = 4;  // keys that a group of lanes loads together
constexpr int kLeast = 64;                  // keys of a part

template <typename T, typename KV, int kDim>
__global__ void __launch_bounds__(kThreads) split(Decode<T, KV> p, Parts parts, int splits) {
  constexpr int kOfLane = 16 / sizeof(KV), kLanes = kDim / kOfLane, kGroups = kThreads / kLanes;
  __shared__ float2 stats[kGroups];
  __shared__ float sums_of[kGroups][kDim];
  const int head = blockIdx.y, number = blockIdx.z / p.new_tokens, query = blockIdx.z % p.new_tokens;
  const int kv_head = head / p.group(), seen = p.seen(query, p.keys(number));
  const int each = (seen + splits - 1) / splits, begin = blockIdx.x * each, end = min(begin + each, seen);
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kOfLane;

  float q[kOfLane], sums[kOfLane] = {}, base = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    q[i] = to_float(p.q.at(number, query, head)[column + i]) * (p.scale * p.scale_of_k() * kLog2E);
  for (int key0 = begin; key0 < end; key0 += kAtOnce * kGroups) {  // all lanes take the same number of turns: they shuffle
    uint4 k[kAtOnce], v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int key = key0 + i * kGroups + group;
      if (key >= end) {  //@ last_key
        k[i] = v[i] = uint4{};
        continue;
      }
      const int block = p.block_of(number, key), slot = p.slot_of(key);
      k[i] = *reinterpret_cast<const uint4*>(p.k.at(block, slot, kv_head) + column);
      v[i] = *reinterpret_cast<const uint4*>(p.v.at(block, slot, kv_head) + column);
    }
    float scores[kAtOnce], highest = base;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float values[kOfLane];
      unpack<KV>(k[i], values);
      scores[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) scores[i] = fmaf(q[j], values[j], scores[i]);
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) scores[i] += __shfl_xor_sync(0xffffffff, scores[i], mask);
      if (key0 + i * kGroups + group >= end) scores[i] = -INFINITY;
      highest = fmaxf(highest, scores[i]);
    }
    const float rescale = exp2_approx(base - base_of_row(highest));
    base = highest, total *= rescale;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) sums[j] *= rescale;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float values[kOfLane];
      unpack<KV>(v[i], values);
      const float power = exp2_approx(scores[i] - base_of_row(base));
      total += power;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) sums[j] = fmaf(power, values[j], sums[j]);
    }
  }

#pragma unroll
  for (int j = 0; j < kOfLane; ++j) sums_of[group][column + j] = sums[j];
  if (column == 0) stats[group] = {base, total};
  __syncthreads();
  if (threadIdx.x >= kDim / 4) return;
  const int at = threadIdx.x * 4, row = query * p.group() + head % p.group();
  const Merged all = merge(kGroups, [&](int i) { return stats[i]; },
                           [&](int i) { return *reinterpret_cast<const float4*>(&sums_of[i][at]); });
  if (splits == 1) return store_out(p, number, kv_head, row, at, all.divided(p.scale_of_v()));
  const int slot = ((number * p.kv_heads + kv_head) * p.rows() + row) * splits + blockIdx.x;
  parts.sums_at(slot, 0, at) = all.sums;
  if (threadIdx.x == 0) parts.stats_at(slot, 0) = {all.base, all.total};
}

template <int kDim, typename T, typename KV>
void launch_dim(const Decode<T, KV>& p) {
  const int64_t items = int64_t(p.batch) * p.new_tokens * p.heads;
  const int splits = split_count(items, 8 * multiprocessors(), p.most, kLeast);
  STD_TORCH_CHECK(int64_t(p.batch) * p.new_tokens <= 65535 && p.heads <= 65535 && items * splits * kDim < INT_MAX,
                  "decode_attention: more queries and heads than v02_split takes");
  const Tensor memory = scratch_words(splits > 1 ? Parts::words(items * splits, 1, kDim) : 0);
  const Parts parts = Parts::at(memory.mutable_data_ptr(), items * splits, 1, kDim);
  const auto kernel = split<T, KV, kDim>;
  kernel<<<dim3(splits, p.heads, p.batch * p.new_tokens), kThreads, 0, p.stream>>>(p, parts, splits);
  if (splits > 1)
    combine<<<dim3(p.kv_heads * p.rows(), p.batch), kCombineThreads, 0, p.stream>>>(p, parts, splits);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  require_vectors(p);
  for_power_of_two(p.dim, [&]<int kDim>() { launch_dim<kDim>(p); });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v02_split, minfer::launch)
