// The mainloop of `packed.cuh` with a window of keys and a soft cap, and the sums of parts with sinks.
#pragma once

#include "packed.cuh"
#include "scored.h"

namespace minfer {

// A PackedWarp whose pieces begin at the unit that has the first key that any row sees.
template <typename Shape>
struct ScoredWarp : PackedWarp<Shape> {
  using Base = PackedWarp<Shape>;
  using T = typename Shape::T;
  using KV = typename Shape::KV;
  using Operand = typename Shape::Operand;
  using Place = typename Shape::Place;
  using Base::factor, Base::online, Base::p, Base::q, Base::ring, Base::sums, Base::unit;
  static constexpr int kSlabs = Shape::kSlabs, kDim = Shape::kDim;

  const Scoring& scoring;

  __device__ ScoredWarp(const Decode<T, KV>& p, const Scoring& scoring, unsigned char* shared)
      : Base(p, shared), scoring(scoring) {}

  // The first key that any row sees.
  __device__ static int first_key(const Cached& p, const Scoring& scoring, int keys) { return scoring.first(p.seen(0, keys)); }

  // Applies the soft cap, and hides keys that a row does not see. Returns the factor of scores to the exponent of 2.
  __device__ void score(float (&scores)[4], float (&to_exponent)[2], int s, const Piece& piece, int key0, bool edge) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      to_exponent[c] = factor[s][c];
      if (scoring.softcap > 0.0f) {
        const float inside = factor[s][c] / (kLog2E * scoring.softcap);
#pragma unroll
        for (int n = c; n < 4; n += 2) scores[n] = scoring.softcap * tanh_by_exp2(scores[n] * inside);  //@ cap
        to_exponent[c] = kLog2E;
      }
      if (!edge) continue;
      const int query = (piece.row0 + 8 * s + threadIdx.x % 4 * 2 + c) / p.group(), key = key0 + threadIdx.x % 32 / 4;
      const int seen = min(piece.keys, p.seen(query, piece.keys)), first = scoring.first(seen);  //@ first
      if (key >= seen || key < first) scores[c] = -INFINITY;
      if (key + 8 >= seen || key + 8 < first) scores[c + 2] = -INFINITY;
    }
  }

  // Overwrites the values of keys that no row sees with zeros, because they may be NaN.
  __device__ void clear_front(unsigned char* values, int rows) const {
    for (int i = threadIdx.x % 32; i < rows * Shape::kPieces; i += 32)
      *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(values) + Place::at(i / Shape::kPieces, i % Shape::kPieces * 8)) =
          uint4{};
    __syncwarp();
  }

  __device__ void multiply(const Piece& piece, int i) {
    const int lane = threadIdx.x % 32, key0 = unit(piece, i) * kUnit, first = first_key(p, scoring, piece.keys);
    unsigned char* stage = ring + i % Shape::kStages * Shape::kStage;
    const uint16_t *k = reinterpret_cast<const uint16_t*>(stage), *v = k + Shape::kHalf / 2;
    if (key0 < first) clear_front(stage + Shape::kHalf, first - key0);  //@ clear_front
    constexpr int kChains = kSlabs == 1 ? 2 : 1;  // independent chains of products
    float scores[kChains][kSlabs][4] = {};
#pragma unroll
    for (int step = 0; step < Shape::kRowBytes / 32; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a, k + Place::at(lane % 16, 16 * step + lane / 16 * 8));
      if constexpr (Shape::kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t low = a[2 * half], high = a[2 * half + 1];
          const uint32_t keys[4] = {e4m3_to_halves(low), e4m3_to_halves(high), e4m3_to_halves(low >> 16),
                                    e4m3_to_halves(high >> 16)};
#pragma unroll
          for (int s = 0; s < kSlabs; ++s) mma_m16n8k16<Operand>(scores[half % kChains][s], keys, q[2 * step + half][s]);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) mma_m16n8k16<Operand>(scores[step % kChains][s], a, q[step][s]);
      }
    }

    // Whether some row may not see some key of the unit: near the last keys, or where the last query's window begins.
    const bool edge = key0 + kUnit > p.seen(0, piece.keys) || key0 < scoring.first(piece.keys);
    uint32_t exponentials[kSlabs][2];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      float(&mine)[4] = scores[0][s];
      if constexpr (kChains == 2) {
#pragma unroll
        for (int n = 0; n < 4; ++n) mine[n] += scores[1][s][n];
      }
      float to_exponent[2], rescale[2];
      score(mine, to_exponent, s, piece, key0, edge);
      if (online[s].add(mine, to_exponent, rescale)) {
#pragma unroll
        for (int n = 0; n < kDim / 4; ++n) sums[n / 4][s][n % 4] *= rescale[n % 2];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t two;
        round_to(reinterpret_cast<typename Vector<Operand>::Pair&>(two), mine[2 * half], mine[2 * half + 1]);
        exponentials[s][half] = movmatrix_trans(two);
      }
    }

#pragma unroll
    for (int j = 0; j < Shape::kRowBytes / 32; ++j) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, v + Place::at(lane / 16 * 8 + lane % 8, 16 * j + lane / 8 % 2 * 8));
      if constexpr (Shape::kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t low = a[half], high = a[2 + half];
          const uint32_t values[4] = {
              e4m3_to_halves(__byte_perm(low, 0, 0x4420)), e4m3_to_halves(__byte_perm(low, 0, 0x4431)),
              e4m3_to_halves(__byte_perm(high, 0, 0x4420)), e4m3_to_halves(__byte_perm(high, 0, 0x4431))};
#pragma unroll
          for (int s = 0; s < kSlabs; ++s) mma_m16n8k16<Operand>(sums[2 * j + half][s], values, exponentials[s]);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) mma_m16n8k16<Operand>(sums[j][s], a, exponentials[s]);
      }
    }
  }

  // As PackedWarp::run.
  __device__ void run(const Piece& piece) {
    constexpr int kAhead = Base::kAhead;
    this->template copy_first<Base::kEarly, kAhead>(piece);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      online[s] = {};
#pragma unroll
      for (int n = 0; n < kDim / 4; ++n) sums[n / 4][s][n % 4] = 0.0f;
    }
    this->prepare_q();
    const int units = this->count(piece);
    int next = kAhead < units ? this->look_up(piece, kAhead) : 0;
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      cp_async_wait<Shape::kStages - 2>();  //@ scored_arrived
      __syncwarp();  // the stage has arrived for all lanes, and all have multiplied the previous one
      const int ahead = i + kAhead, here = next;
      if (ahead + 1 < units) next = this->look_up(piece, ahead + 1);
      if (ahead < units) this->copy(piece, ahead, here);
      cp_async_commit();
      multiply(piece, i);
    }
    __syncwarp();  // all lanes have multiplied the last unit
  }
};

// The sum of a row's parts, divided by the sum of its exponentials, the exponential of the head's sink included.
__device__ inline float4 divided(const Merged& all, const Scoring& scoring, int head, float scale) {
  if (!scoring.sinks || !(all.total > 0.0f)) return all.divided(scale);
  Merged with = all;
  with.total += exp2_approx(fmaf(scoring.sinks[head], kLog2E, -all.base));  // infinite for a sink far above: then out is 0
  return with.divided(scale);
}

}  // namespace minfer
