// The rope_append kernel, for heads whose pieces are 16 bytes or one element.
//
// A thread has a piece of the first half of what is rotated, and the piece at the same place of the second half, of some heads
// of one token. The threads of a head are a power of two, at most a warp, so a norm takes a few shuffles.
#pragma once

#include "cuda/dependent.cuh"
#include "cuda/row_pieces.cuh"
#include "rope_append.h"

namespace minfer {

constexpr int kThreads = 128;
#ifndef MINFER_ROPE_APPEND_HEADS
#define MINFER_ROPE_APPEND_HEADS 2
#endif
constexpr int kManyHeads = MINFER_ROPE_APPEND_HEADS;  // of a thread, where there are many tokens

// Fp32 values of the pieces of a, at a place, and of b, at the same place of the second half.
template <typename Piece>
struct Pair {
  static constexpr int kCount = Piece::kCount;
  Piece a, b;

  template <typename T>
  __device__ void load(const T* head, int place, int count) {
    a.bits = pieces_of<Piece>(head)[place], b.bits = pieces_of<Piece>(head)[place + count];
  }
  template <typename T>
  __device__ void store(T* head, int place, int count) const {
    BitsOf<Piece>* to = reinterpret_cast<BitsOf<Piece>*>(head);
    to[place] = a.bits, to[place + count] = b.bits;
  }
  __device__ float squares() const {
    float x[kCount], y[kCount], sum = 0.0f;
    a.unpack(x), b.unpack(y);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += x[i] * x[i] + y[i] * y[i];
    return sum;
  }
  // Times scale and a weight of each element.
  __device__ void rotate(const float (&cos)[kCount], const float (&sin)[kCount], bool scaled, float scale, const Pair& weight) {
    float x[kCount], y[kCount];
    a.unpack(x), b.unpack(y);
    if (scaled) {
      float of_x[kCount], of_y[kCount];
      weight.a.unpack(of_x), weight.b.unpack(of_y);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= scale * of_x[i], y[i] *= scale * of_y[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float before = x[i];
      x[i] = before * cos[i] - y[i] * sin[i];  //@ minus
      y[i] = y[i] * cos[i] + before * sin[i];
    }
    a = Piece(x), b = Piece(y);
  }
};

template <int kCount>
__device__ void load_angles(float (&to)[kCount], const float* from) {
  if constexpr (kCount == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }
}

template <typename Piece, typename T>
__device__ Piece piece_at(const T* row, int at) {
  Piece piece;
  piece.bits = pieces_of<Piece>(row)[at];
  return piece;
}

template <typename Piece>
__device__ float squares(const Piece& piece) {
  float x[Piece::kCount], sum = 0.0f;
  piece.unpack(x);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) sum += x[i] * x[i];
  return sum;
}

template <typename Piece>
__device__ Piece scaled_by(const Piece& piece, float scale, const Piece& weight) {
  float x[Piece::kCount], w[Piece::kCount];
  piece.unpack(x), weight.unpack(w);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) x[i] *= scale * w[i];
  return Piece(x);
}

// The sum over the threads of a head, which are neighbours in a warp.
__device__ inline float sum_of_head(float value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// A unit is one slot of a token: every `slots`-th head, beginning with head `slot`. 2^log_lanes threads compute a unit. If
// kEarly, blocks start while the previous launch still runs, and read nothing before it has ended.
template <typename Piece, bool kNorm, int kHeads, bool kEarly, typename T>
__global__ void __launch_bounds__(kThreads) heads(RopeAppend<T> p, int slots, int log_lanes) {
  constexpr int kCount = Piece::kCount;
  if constexpr (kEarly) let_next_start(), wait_for_previous();
  const int lanes = 1 << log_lanes, lane = threadIdx.x % lanes;
  const int unit = blockIdx.x * (kThreads >> log_lanes) + (threadIdx.x >> log_lanes), token = unit / slots, slot = unit % slots;
  const bool there = token < p.tokens;
  const int count = p.half / kCount, all = there ? p.all_heads() : 0, pieces = p.dim / kCount;
  const int row = there ? p.positions[token] : -1;  // loaded while the heads are
  const int64_t where = there ? p.where[token] : -1;
  Pair<Piece> pairs[kHeads];
  float cos[kCount], sin[kCount], scales[kHeads];
  int place = lane;
  const auto load = [&] {
    if (place >= count) return;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = slot + i * slots;
      if (head < all) pairs[i].load(p.from(token, head), place, count);
    }
    if (p.has_row(row)) {
      load_angles(cos, p.cos + row * p.cos_stride + place * kCount);
      load_angles(sin, p.sin + row * p.sin_stride + place * kCount);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) cos[i] = sin[i] = NAN;
    }
  };
  load();
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = slot + i * slots;
      float sum = pairs[i].squares();
      if (head < all) {  // further pieces, in long heads and in those that are rotated in part
        const T* from = p.from(token, head);
        for (int at = place + lanes; at < count; at += lanes) {
          Pair<Piece> pair;
          pair.load(from, at, count);
          sum += pair.squares();
        }
        for (int at = 2 * count + lane; at < pieces; at += lanes) sum += squares(piece_at<Piece>(from, at));
      }
      scales[i] = rsqrtf(sum_of_head(sum, lanes) * p.share + p.eps);  //@ head_sum
    }
  }
  while (place < count) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = slot + i * slots;
      if (head >= all) continue;
      if (p.part(head) != Part::v) {  //@ values
        Pair<Piece> weight;
        if constexpr (kNorm) weight.load(p.weights[p.part(head) == Part::k], place, count);  //@ weights
        pairs[i].rotate(cos, sin, kNorm, kNorm ? scales[i] : 1.0f, weight);
      }
      if (T* to = p.to(token, head, where)) pairs[i].store(to, place, count);  //@ place
    }
    place += lanes;
    load();
  }
  if (2 * count == pieces) return;  //@ rest
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = slot + i * slots;
    if (head >= all) continue;
    T* to = p.to(token, head, where);
    if (to == nullptr) continue;
    for (int at = 2 * count + lane; at < pieces; at += lanes) {
      Piece piece = piece_at<Piece>(p.from(token, head), at);
      if (kNorm && p.part(head) != Part::v)
        piece = scaled_by(piece, scales[i], piece_at<Piece>(p.weights[p.part(head) == Part::k], at));
      reinterpret_cast<BitsOf<Piece>*>(to)[at] = piece.bits;
    }
  }
}

template <typename Piece, int kHeads, bool kEarly = false, typename T>
void launch_heads(const RopeAppend<T>& p) {
  int log_lanes = 0;  // of the threads of a head
  while (log_lanes < 5 && 1 << log_lanes < p.half / Piece::kCount) ++log_lanes;
  const int slots = (p.all_heads() + kHeads - 1) / kHeads, of_block = kThreads >> log_lanes;
  const int blocks = (p.tokens * slots + of_block - 1) / of_block;
  const auto kernel = p.has_norm() ? heads<Piece, true, kHeads, kEarly, T> : heads<Piece, false, kHeads, kEarly, T>;
  if constexpr (kEarly) STD_CUDA_CHECK(launch_early(kernel, 1, dim3(blocks), kThreads, 0, p.stream, p, slots, log_lanes));
  else kernel<<<blocks, kThreads, 0, p.stream>>>(p, slots, log_lanes);
}

}  // namespace minfer
