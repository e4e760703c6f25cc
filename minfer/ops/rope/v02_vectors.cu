// v02_vectors: 16-byte loads and stores of q and k in one launch; cosine and sine stay in registers over a thread's heads.
// Idea: for each of its heads a thread loads one vector of the first half of what is rotated and the vector at the same
// place of the second half. In both styles the two contain whole pairs. It issues these loads for all of its heads at once,
// and those of the angles, which all heads of a token share. The thread's index gives its place and its heads without a
// division before the first load.
// Expected: near the copy's speed for many tokens: 16384 of 40 heads of 128 are 336 MB in a half type and 8 MB of angles,
// 80 us at 4.28 TB/s. For few tokens two latencies, of the kernel's start and of the loads; with given positions three.
// Measured (H200, float32, counted, out, batch=32, seq=2048, heads=8, kv_heads=0, head_dim=256, rotary_dim=256): 4071 GB/s
//   cold, 4042 steady; 748.4 % and 740.2 % of torch.
#include <algorithm>

#include "cuda/vector.cuh"
#include "rope.h"

namespace minfer {

// Heads of a thread where there are many tokens, and so 32 bytes times this of loads under way; and where there are few.
#ifndef MINFER_ROPE_HEADS
#define MINFER_ROPE_HEADS 2
#endif
constexpr int kManyHeads = MINFER_ROPE_HEADS, kFewHeads = 1;
constexpr int kMostThreads = 512;   // of a block
constexpr int kLeastThreads = 128;  // of a block of several tokens, which have too few heads for one each
constexpr unsigned kMostBlocks = 65535;  // in the second dimension of a grid

template <int kCount>
__device__ void load_floats(float (&to)[kCount], const float* from) {
  if constexpr (kCount == 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    to[0] = pair.x, to[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }
}

// Cosines or sines of the pairs in the two vectors at a place. Interleaved, each vector has its own pairs.
template <bool kInterleaved, int kCount>
struct Angles {
  float values[kInterleaved ? 2 : 1][kInterleaved ? kCount / 2 : kCount];

  __device__ void load(const float* row, int place, int vectors) {
    if constexpr (kInterleaved) {
      load_floats(values[0], row + place * (kCount / 2));
      load_floats(values[1], row + (place + vectors) * (kCount / 2));
    } else {
      load_floats(values[0], row + place * kCount);
    }
  }
  __device__ void fill(float value) {
    for (auto& part : values)
      for (float& each : part) each = value;
  }
};

template <bool kBackward, bool kInterleaved, typename T>
__device__ void rotate(Vector<T>& a, Vector<T>& b, const Angles<kInterleaved, Vector<T>::kCount>& cos,
                       const Angles<kInterleaved, Vector<T>::kCount>& sin) {
  constexpr int kCount = Vector<T>::kCount;
  float first[kCount], second[kCount];
  a.unpack(first), b.unpack(second);
#pragma unroll
  for (int i = 0; i < kCount / (kInterleaved ? 2 : 1); ++i) {
    const float s = sin.values[0][i];
    if constexpr (kInterleaved) {
      const float t = sin.values[1][i];
      rotate_pair(first[2 * i], first[2 * i + 1], cos.values[0][i], kBackward ? -s : s);
      rotate_pair(second[2 * i], second[2 * i + 1], cos.values[1][i], kBackward ? -t : t);  //@ sine_pairs
    } else {
      rotate_pair(first[i], second[i], cos.values[0][i], kBackward ? -s : s);  //@ sine_halves
    }
  }
  a = Vector<T>(first), b = Vector<T>(second);
}

// A thread is at (place, head, token) of its block; blocks are at (tokens, sequence) of the grid.
template <bool kBackward, bool kInterleaved, int kHeads, typename T>
__global__ void __launch_bounds__(kMostThreads) vectors(Rope<T> p) {
  constexpr int kCount = Vector<T>::kCount;
  const int token = blockIdx.x * blockDim.z + threadIdx.z, count = p.half / kCount, all = p.all_heads();
  if (token >= p.seq) return;  //@ token
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    const int row = p.position(batch, token);  // on its way while q and k are asked for
    for (int place = threadIdx.x; place < count; place += blockDim.x) {
      Vector<T> a[kHeads], b[kHeads];
      const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
          const int head = first + i * blockDim.y;
          if (head < all)
            p.with_head(batch, token, head, [&](const T* from, T*) {
              a[i].bits = reinterpret_cast<const uint4*>(from)[place];
              b[i].bits = reinterpret_cast<const uint4*>(from)[place + count];
            });
        }
      };
      int first = threadIdx.y;
      load(first);
      Angles<kInterleaved, kCount> cos, sin;
      if (p.has_row(row)) cos.load(p.cos + row * p.cos_stride, place, count), sin.load(p.sin + row * p.sin_stride, place, count);
      else cos.fill(NAN), sin.fill(NAN);
      while (true) {
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
          const int head = first + i * blockDim.y;
          if (head < all)
            p.with_head(batch, token, head, [&](const T*, T* to) {
              rotate<kBackward, kInterleaved, T>(a[i], b[i], cos, sin);
              reinterpret_cast<uint4*>(to)[place] = a[i].bits;
              reinterpret_cast<uint4*>(to)[place + count] = b[i].bits;
            });
        }
        first += kHeads * blockDim.y;
        if (first >= all) break;
        load(first);
      }
    }
    if (p.in_place) continue;  //@ in_place
    for (int head = threadIdx.y; head < all; head += blockDim.y)
      p.with_head(batch, token, head, [&](const T* from, T* to) {
        for (int place = 2 * count + threadIdx.x; place < p.dim / kCount; place += blockDim.x)
          reinterpret_cast<uint4*>(to)[place] = reinterpret_cast<const uint4*>(from)[place];
      });
  }
}

template <int kHeads, bool kBackward, bool kInterleaved, typename T>
void launch(const Rope<T>& p) {
  const int places = std::min(p.half / Vector<T>::kCount, kMostThreads), most = kMostThreads / places;
  const int rounds = (p.all_heads() + kHeads * most - 1) / (kHeads * most);  // in which a block has all heads
  const int heads = (p.all_heads() + kHeads * rounds - 1) / (kHeads * rounds);
  const int tokens = std::min({std::max(1, kLeastThreads / (places * heads)), p.seq, 64});
  const dim3 grid((p.seq + tokens - 1) / tokens, std::min<unsigned>(p.batch, kMostBlocks));
  vectors<kBackward, kInterleaved, kHeads, T><<<grid, dim3(places, heads, tokens), 0, p.stream>>>(p);
}

struct Vectors {
  template <bool kBackward, bool kInterleaved, typename T>
  static void run(const Rope<T>& p) {
    require_vectors(p);
    // With few tokens no SM has enough to do, and a thread should have as little as possible.
    if (int64_t(p.batch) * p.seq <= 2 * multiprocessors()) launch<kFewHeads, kBackward, kInterleaved>(p);
    else launch<kManyHeads, kBackward, kInterleaved>(p);
  }
};

}  // namespace minfer

MINFER_ROPE(rope_v02_vectors, minfer::Vectors)
