// v02_one_launch: a warp a token, a bit for each token that chose an expert, and one barrier of all blocks.
// Idea: a block chooses for a group of at most 32 tokens, a lane for every 32nd expert, by k maxima over the warp. Whom the
// group chose is a word an expert, a bit a token. Then a slot's place within its expert is a count of bits: no sort, and no
// atomic whose order matters. Between groups a row of counts for each block is enough: each block writes its own, meets the
// others, reads all rows and adds up those of all blocks and those before it.
// Expected, on an H200: launch 2 us; the logits' way from memory 1 us; 220 instructions of a warp a token, so that 32 tokens
// take an SM 1 us; the barrier and the rows, three trips to L2, 2.5 us. About 4 us for one block, which has no barrier, 6 us
// for 128 tokens in 16 blocks, and 7 us for 4096 tokens in 128 blocks.
// Measured (H200, float32, tokens=4096, experts=128, k=8): 144.4 GB/s cold, 174.4 steady; 925.4 % and 914.5 % of torch.
#include <algorithm>

#include "cuda/counters.cuh"
#include "cuda/grid.cuh"
#include "moe_route.h"

namespace minfer {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // as many threads as there are experts at most
constexpr int kMostRows = 32;                      // of counts that are added up side by side
constexpr int kBlocksOfSm = 2;                     // that certainly run at once
constexpr unsigned kAll = 0xffffffff;

// Integers in the order of the floats, from 0x007fffff for -infinity; a NaN is above all numbers.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0xffffffff : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
__device__ inline float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAll, value, mask);
  return value;
}

// The tokens of a block: `groups` of them, each of kWarps * kPerWarp.
template <int kPerWarp>
struct Share {
  static constexpr int kGroup = kWarps * kPerWarp;
  int groups, first, count;  // tokens

  __device__ Share(int tokens, int groups)
      : groups(groups), first(blockIdx.x * groups * kGroup), count(min(groups * kGroup, tokens - first)) {}
};

// A warp chooses for one token, whose logit of expert 32 i + lane is x[i] of a lane. It marks the token's bit in the words of
// the experts, and notes them in `chosen`.
template <typename T, int kValues>
__device__ void choose(const Route<T>& p, const float (&x)[kValues], int token, unsigned* words, unsigned bit,
                       unsigned char* chosen) {
  const int lane = threadIdx.x % 32;
  unsigned key[kValues], best = 0;  // 0: no expert, or one that is taken
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    key[i] = 32 * i + lane < p.experts ? ordered(x[i]) : 0;
    best = max(best, key[i]);
  }
  unsigned own = 0;  // of rank `lane`
  int expert = 0;
  for (int rank = 0; rank < p.k; ++rank) {
    const unsigned top = __reduce_max_sync(kAll, best);
    const int winner = __ffs(__ballot_sync(kAll, best == top)) - 1;
    int at = 0;
    if (lane == winner) {
      bool is_left = true;
      best = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (is_left && key[i] == top) key[i] = 0, at = 32 * i + lane, is_left = false;
        best = max(best, key[i]);
      }
      atomicAdd(&words[at], bit);  // each bit once: in any order the same
      chosen[rank] = at;
    }
    at = __shfl_sync(kAll, at, winner);
    if (lane == rank) own = top, expert = at;
  }

  const float most = from_ordered(__shfl_sync(kAll, own, 0));
  const float weight = lane < p.k ? expf(from_ordered(own) - most) : 0.0f;
  float sum = weight;
  if (!p.normalize) {
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (32 * i + lane < p.experts) sum += expf(x[i] - most);
  }
  sum = warp_sum(sum);
  if (lane < p.k) {
    p.weights[int64_t(token) * p.k + lane] = weight / sum;
    p.indices[int64_t(token) * p.k + lane] = expert;
  }
}

// Of an expert, the slots of all blocks and of those before this one.
struct Counts {
  int all, before;
};

// Thread e brings the count of expert e in this block, and is given the expert's. `rows` has a row of `padded` counts for
// each block.
__device__ inline Counts exchange(int own, int experts, uint16_t* rows, unsigned* arrived) {
  __shared__ int4 partial[2][kThreads];  // of all blocks, and of those before
  const int quads = (experts + 3) / 4, padded = 4 * quads, blocks = gridDim.x;
  if (threadIdx.x < padded) rows[blockIdx.x * padded + threadIdx.x] = own;
  team_sync(arrived, blocks, blockIdx.x == 0);
  const int at_once = min(kThreads / quads, kMostRows), quad = threadIdx.x % quads;
  int4 all{}, before{};
  if (threadIdx.x < at_once * quads) {
#pragma unroll 8
    for (int row = threadIdx.x / quads; row < blocks; row += at_once) {
      const uint2 four = __ldcg(reinterpret_cast<const uint2*>(rows + row * padded) + quad);
      const int a = four.x & 0xffff, b = four.x >> 16, c = four.y & 0xffff, d = four.y >> 16;
      all.x += a, all.y += b, all.z += c, all.w += d;
      if (row < blockIdx.x) before.x += a, before.y += b, before.z += c, before.w += d;
    }
    partial[0][threadIdx.x] = all, partial[1][threadIdx.x] = before;
  }
  __syncthreads();
  Counts found{0, 0};
  if (threadIdx.x < experts)
    for (int i = 0; i < at_once; ++i) {
      found.all += reinterpret_cast<const int*>(partial[0])[i * padded + threadIdx.x];
      found.before += reinterpret_cast<const int*>(partial[1])[i * padded + threadIdx.x];
    }
  return found;
}

// The sum over the threads before this one.
__device__ inline int sum_before(int value) {
  __shared__ int of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(kAll, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i)
    if (i < warp) sum += of_warps[i];
  return sum - value;
}

template <typename T, int kValues, int kPerWarp>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    one_launch(Route<T> p, int groups, uint16_t* rows, unsigned* counters) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int place[kThreads];  // of an expert's first slot of this block
  constexpr int kGroup = Share<kPerWarp>::kGroup;
  const Share<kPerWarp> share(p.tokens, groups);
  unsigned* words = reinterpret_cast<unsigned*>(shared);  // of each group and expert, a bit for each token
  unsigned char* chosen = shared + 4 * groups * p.experts;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  for (int i = threadIdx.x; i < groups * p.experts; i += kThreads) words[i] = 0;
  __syncthreads();
  for (int group = 0; group < groups; ++group) {
    const int begin = group * kGroup + warp * kPerWarp;  // in the block
    float x[kPerWarp][kValues];
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        const bool inside = begin + i < share.count && 32 * j + lane < p.experts;
        x[i][j] = inside ? float(p.logits[(share.first + begin + i) * p.stride + 32 * j + lane]) : 0.0f;
      }
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (begin + i < share.count)
        choose<T, kValues>(p, x[i], share.first + begin + i, words + group * p.experts, 1u << (warp * kPerWarp + i),
                           chosen + (begin + i) * p.k);
  }
  __syncthreads();  //@ chosen

  const int expert = threadIdx.x;
  int own = 0;
  if (expert < p.experts)
    for (int group = 0; group < groups; ++group) own += __popc(words[group * p.experts + expert]);
  const Counts counts = gridDim.x > 1 ? exchange(own, p.experts, rows, counters) : Counts{own, 0};
  const int begin = sum_before(counts.all);
  if (blockIdx.x == 0 && expert < p.experts) p.counts[expert] = counts.all, p.offsets[expert] = begin + counts.all;
  place[expert] = begin + counts.before;  //@ before
  __syncthreads();

  for (int slot = threadIdx.x; slot < share.count * p.k; slot += kThreads) {
    const int token = slot / p.k, group = token / kGroup, it = chosen[slot];
    int at = place[it];
    for (int i = 0; i < group; ++i) at += __popc(words[i * p.experts + it]);
    at += __popc(words[group * p.experts + it] & ((1u << token % kGroup) - 1));
    p.order[at] = share.first * p.k + slot;
  }
}

template <int kValues, int kPerWarp, typename T>
void launch_groups(const Route<T>& p) {
  constexpr int kGroup = Share<kPerWarp>::kGroup;
  const int all = (p.tokens + kGroup - 1) / kGroup, most = kBlocksOfSm * multiprocessors();
  const int groups = (all + most - 1) / most, blocks = (all + groups - 1) / groups;  // of a block; in all
  const int shared = groups * (4 * p.experts + kGroup * p.k);
  STD_TORCH_CHECK(shared <= 40 << 10, "moe_route: logits must have fewer tokens for v02_one_launch, got ", p.tokens);
  const auto kernel = one_launch<T, kValues, kPerWarp>;
  if (blocks == 1) {
    kernel<<<1, kThreads, shared, p.stream>>>(p, groups, nullptr, nullptr);
    return;
  }
  const auto rows = scratch_words(int64_t(blocks) * ((p.experts + 3) / 4) * 2);
  STD_CUDA_CHECK(launch_together(kernel, blocks, kThreads, shared, p.stream, p, groups,
                                 static_cast<uint16_t*>(rows.mutable_data_ptr()), counters_of(p.stream)));
}

template <int kValues, typename T>
void launch_values(const Route<T>& p) {
  // One token a warp where that takes no more blocks than there are SMs, but one block alone where the barrier would take
  // longer than three more tokens of a warp.
  const bool alone = p.tokens > kWarps && p.tokens <= 4 * kWarps;
  if (!alone && p.tokens <= kWarps * multiprocessors()) launch_groups<kValues, 1>(p);
  else launch_groups<kValues, 4>(p);
}

template <typename T>
void launch(const Route<T>& p) {
  STD_TORCH_CHECK(p.experts <= kThreads && p.k <= 32, "moe_route: v02_one_launch takes at most 256 experts and k = 32, got ",
                  p.experts, " and ", p.k);
  if (p.experts <= 32) launch_values<1>(p);
  else if (p.experts <= 64) launch_values<2>(p);
  else if (p.experts <= 128) launch_values<4>(p);
  else launch_values<8>(p);
}

}  // namespace minfer

MINFER_MOE_ROUTE(moe_route_v02_one_launch, minfer::launch)
