// Drawing a token of one row without a sort, by a team of blocks that have a part of the row each.
//
// A token's distance is log2 of how much less probable it is than the most probable one, as an integer in units of 2^-27,
// so that one that is less probable has no smaller distance, and the kept set is a largest distance. Distances of 32 octaves
// and more are not distinguished: nobody draws such tokens. top_k and top_p find their largest distance by its digits, 8 bits
// at a time from the highest: in each pass the tokens that agree with the digits so far are counted, and their masses added
// up, in a bin for each next digit. A mass is an integer, too, in units of 2^-30 of the largest: sums of integers are the
// same in any order, so that atomics and teams of any size give the same token.
//
// A Team has `rank` and `size`, and three operations in which all its blocks take part:
//   float most(float mine)                      the largest of the threads' values, in the whole team
//   void add_up(const Bins& mine, Bins& sum)    the sums of all blocks' bins
//   void gather(uint64_t mine, uint64_t* all)   thread 0 brings its block's mass; `all` is every block's, by rank
// each with a barrier of the block before anything is read and behind what it writes. `mine` of add_up stays as it is until
// the next but one operation.
#pragma once

#include "ops/logits.h"

namespace minfer {

constexpr unsigned kNever = 0xffffffff;  // the distance of a token that is not drawn
constexpr int kBins = 256, kMostTeam = 64;
constexpr unsigned kAll = 0xffffffff;

__device__ inline unsigned distance_of(float x, float most, float scale) {
  if (x == most) return 0;
  const float octaves = (most - x) * scale;
  return octaves < 32.0f ? static_cast<unsigned>(octaves * 0x1p27f) : kNever;  // never, if it is a NaN
}

// Of each bin the tokens, and the lower and higher `half` bits of their masses, added up apart: sums fit 32 bits.
struct Bins {
  unsigned count[kBins], low[kBins], high[kBins];
};

// Masses have 2 `half` bits, so many that 2^half vocab is at most 2^32.
struct Masses {
  int half;
  float unit;

  __device__ explicit Masses(int vocab)
      : half(vocab <= 1 << 17 ? 15 : vocab <= 1 << 18 ? 14 : 13), unit(float((1u << 2 * half) - 1)) {}
  __device__ unsigned of(unsigned distance) const {
    const unsigned most = (1u << 2 * half) - 1;
    return distance == kNever ? 0 : min(most, static_cast<unsigned>(exp2f(float(distance) * -0x1p-27f) * unit + 0.5f));
  }
  __device__ uint64_t in(const Bins& bins, int bin) const {
    return (uint64_t(bins.high[bin]) << half) + bins.low[bin];
  }
};

struct Found {
  int bin;  // -1: there is none
  uint64_t count, mass;  // up to it, and with it
};

struct Limit {
  unsigned distance;
  uint64_t mass;  // up to it
};

template <int kThreads>
struct Workspace {
  Bins mine[2], first, sum;  // `first`: the sums of the first digit, of all tokens
  float partial[kThreads / 32];
  uint64_t of_warps[kThreads / 32], all[kMostTeam];
  Found found;
};

// The largest of the threads' values.
template <int kThreads>
__device__ float block_most(float value, float* partial) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, mask));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < kThreads / 32; ++i) value = fmaxf(value, partial[i]);
  return value;
}

// The sum over the lanes up to this one.
__device__ inline uint64_t sum_to(uint64_t value) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const uint64_t other = __shfl_up_sync(kAll, value, by);
    if (threadIdx.x % 32 >= by) value += other;
  }
  return value;
}

// A row, or a block's part of it, and what is drawn from it. `distance(i)` is that of the part's i-th token.
template <int kThreads, typename Team, typename Distance>
struct Row {
  Workspace<kThreads>& work;
  Team& team;
  Distance distance;
  Masses masses;
  int count;       // of the part
  int passes = 0;  // so far

  // Adds up the tokens whose digits above `shift` + 8 are those of `prefix`, by their next digit.
  __device__ void add_up(unsigned prefix, int shift, Bins& sum) {
    Bins& bins = work.mine[passes++ % 2];
    for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) reinterpret_cast<unsigned*>(&bins)[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const unsigned d = distance(i);
      if (d == kNever || (shift < 24 && (d ^ prefix) >> (shift + 8))) continue;
      const unsigned bin = d >> shift & (kBins - 1), mass = masses.of(d);
      atomicAdd(&bins.count[bin], 1);
      atomicAdd(&bins.low[bin], mass & ((1u << masses.half) - 1));
      atomicAdd(&bins.high[bin], mass >> masses.half);
    }
    team.add_up(bins, sum);
  }

  // The first bin with which the count, or the mass, is at least `target`, where `count` and `mass` are below all bins.
  __device__ Found first_to_reach(uint64_t target, bool by_mass, const Bins& bins, uint64_t count, uint64_t mass) {
    if (threadIdx.x < 32) {
      const int begin = threadIdx.x * (kBins / 32);
      uint64_t own_count = 0, own_mass = 0;
#pragma unroll
      for (int i = 0; i < kBins / 32; ++i) own_count += bins.count[begin + i], own_mass += masses.in(bins, begin + i);
      const uint64_t counts = sum_to(own_count), sums = sum_to(own_mass);
      const unsigned reached = __ballot_sync(kAll, (by_mass ? mass + sums : count + counts) >= target);
      if (!reached) {
        if (threadIdx.x == 31) work.found = {-1, count + counts, mass + sums};
      } else if (threadIdx.x == __ffs(reached) - 1) {
        count += counts - own_count, mass += sums - own_mass;
        int bin = begin;
        for (;; ++bin) {
          count += bins.count[bin], mass += masses.in(bins, bin);
          if ((by_mass ? mass : count) >= target) break;
        }
        work.found = {bin, count, mass};
      }
    }
    __syncthreads();
    const Found found = work.found;
    __syncthreads();  // all have read it
    return found;
  }

  // The smallest distance up to which there are `target` tokens, or is that mass; all that are ever drawn, where there are
  // fewer. Needs work.first.
  __device__ Limit search(uint64_t target, bool by_mass) {
    uint64_t below = 0, below_mass = 0;
    unsigned prefix = 0;
    for (int shift = 24;; shift -= 8) {
      if (shift < 24) add_up(prefix, shift, work.sum);
      const Bins& bins = shift < 24 ? work.sum : work.first;
      const Found found = first_to_reach(target, by_mass, bins, below, below_mass);
      if (found.bin < 0) return {kNever - 1, found.mass};
      prefix |= unsigned(found.bin) << shift;
      const unsigned inside = bins.count[found.bin];
      // A lone token's further digits change nothing, and nor do those of the last that top_k has room for.
      if (shift == 0 || inside == 1 || (!by_mass && found.count == target))
        return {prefix | ((1u << shift) - 1), found.mass};
      below = found.count - inside, below_mass = found.mass - masses.in(bins, found.bin);
    }
  }

  // The largest distance that is kept.
  template <typename T>
  __device__ unsigned limit_of(const Sample<T>& p) {
    unsigned limit = kNever - 1;
    if (p.top_k || p.top_p < 1.0f) {
      add_up(0, 24, work.first);
      uint64_t target = p.top_k ? p.top_k : kNever;  // without top_k: all, which gives their mass
      for (bool by_mass = false;; by_mass = true) {
        const Limit found = search(target, by_mass);
        limit = min(limit, found.distance);
        if (by_mass || p.top_p >= 1.0f) break;
        target = max(uint64_t{1}, static_cast<uint64_t>(ceil(double(p.top_p) * double(found.mass))));
      }
    }
    return p.min_p_octaves < 32.0f ? min(limit, static_cast<unsigned>(p.min_p_octaves * 0x1p27f)) : limit;
  }

  // The token at which the running sum of the kept masses exceeds u times their sum; -1 in all blocks but its own.
  __device__ int draw(unsigned limit, float u) {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (count + kWarps - 1) / kWarps;
    const int begin = min(count, warp * part), end = min(count, begin + part);
    uint64_t own = 0;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) {
      const unsigned d = distance(i);
      own += d <= limit ? masses.of(d) : 0;
    }
    own = __shfl_sync(kAll, sum_to(own), 31);
    if (lane == 0) work.of_warps[warp] = own;
    __syncthreads();
    uint64_t block = 0, before = 0, whole = 0;
    for (int i = 0; i < kWarps; ++i) block += work.of_warps[i], before += i < warp ? work.of_warps[i] : 0;
    team.gather(block, work.all);
    for (int i = 0; i < team.size; ++i) whole += work.all[i], before += i < team.rank ? work.all[i] : 0;
    if (whole == 0) return team.rank == 0 && threadIdx.x == 0 ? 0 : -1;  // a row of NaN
    const uint64_t wanted = min(whole - 1, static_cast<uint64_t>(double(u) * double(whole)));
    if (wanted < before || wanted >= before + own) return -1;  // another warp's

    const int each = (end - begin + 31) / 32, from = min(end, begin + lane * each), to = min(end, from + each);
    uint64_t sum = 0;
    for (int i = from; i < to; ++i) {
      const unsigned d = distance(i);
      sum += d <= limit ? masses.of(d) : 0;
    }
    before += sum_to(sum) - sum;
    if (wanted < before || wanted >= before + sum) return -1;
    for (int i = from;; ++i) {
      const unsigned d = distance(i);
      before += d <= limit ? masses.of(d) : 0;
      if (wanted < before) return i;
    }
  }
};

// The part of a row that a block of a team has; parts begin at multiples of 8 tokens.
struct Part {
  int begin, count;

  __host__ __device__ static int longest(int vocab, int size) { return ((vocab + size - 1) / size + 7) / 8 * 8; }
  __device__ Part(int vocab, int rank, int size) {
    const int most = longest(vocab, size);
    begin = min(vocab, rank * most), count = min(most, vocab - begin);
  }
};

// A team draws the token of a row. `kept` has a place for each token of the longest part, or is null where tokens are read
// from memory in each pass.
template <int kThreads, bool kKept, typename T, typename Team>
__device__ void sample_row(const Sample<T>& p, int row, Team& team, Workspace<kThreads>& work, unsigned* kept) {
  const Part part(p.vocab, team.rank, team.size);
  const T* x = p.logits + row * p.stride + part.begin;
  float most = -INFINITY;
#pragma unroll 8
  for (int i = threadIdx.x; i < part.count; i += kThreads) {
    const float value = float(x[i]);
    most = fmaxf(most, value);
    if constexpr (kKept) kept[i] = __float_as_uint(value);
  }
  most = team.most(block_most<kThreads>(most, work.partial));
  const auto far = [&](float value) { return distance_of(value, most, p.scale); };
  if constexpr (kKept)
#pragma unroll 8
    for (int i = threadIdx.x; i < part.count; i += kThreads) kept[i] = far(__uint_as_float(kept[i]));
  const auto distance = [&](int i) {
    if constexpr (kKept) return kept[i];
    else return far(float(x[i]));
  };
  Row<kThreads, Team, decltype(distance)> drawn{work, team, distance, Masses(p.vocab), part.count};
  __syncthreads();  // a warp reads in draw() what others kept
  const int token = drawn.draw(drawn.limit_of(p), p.u[row]);
  if (token >= 0) p.tokens[row] = part.begin + token;
}

}  // namespace minfer
