// The mainloop of `packed.cuh` with a window of keys, a soft cap, a tree of new tokens and pages of fewer than 16 slots, and the
// sums of parts with sinks.
#pragma once

#include "packed.cuh"
#include "scored.h"

namespace minfer {

// A PackedWarp whose pieces begin at the unit that has the first key that any row sees. Lane r of 16 looks up the page of key r
// of a unit, which may have a page for each key.
template <typename Shape>
struct ScoredWarp : PackedWarp<Shape> {
  using Base = PackedWarp<Shape>;
  using T = typename Shape::T;
  using KV = typename Shape::KV;
  using Operand = typename Shape::Operand;
  using Place = typename Shape::Place;
  using PlaceOfValue = typename Shape::PlaceOfValue;
  using Base::factor, Base::online, Base::p, Base::q, Base::ring, Base::sums, Base::unit;
  static constexpr int kSlabs = Shape::kSlabs, kVDim = Shape::kVDim;

  const Scoring& scoring;
  const unsigned* seen_new;  // which new tokens each query sees, in shared memory

  __device__ ScoredWarp(const Decode<T, KV>& p, const Scoring& scoring, unsigned char* shared, const unsigned* seen_new)
      : Base(p, shared), scoring(scoring), seen_new(seen_new) {}

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
      const int row = piece.row0 + 8 * s + threadIdx.x % 4 * 2 + c, key = key0 + threadIdx.x % 32 / 4;
      const int query = min(row / p.group(), p.new_tokens - 1);  // rows beyond the last are not stored
      const int seen = p.seen(query, piece.keys), first = scoring.first(seen);  //@ first
      const unsigned mask = seen_new[query];  //@ tree
      const bool none = seen == 0;  //@ before_first
      if (none || key < first || !is_seen(p, piece.keys, mask, key)) scores[c] = -INFINITY;
      if (none || key + 8 < first || !is_seen(p, piece.keys, mask, key + 8)) scores[c + 2] = -INFINITY;
    }
  }

  // The page of the lane's key of unit i. Keys beyond the last take the page of the last.
  __device__ int look_up(const Piece& piece, int i) const {
    const int key = min(unit(piece, i) * kUnit + int(threadIdx.x % kUnit), piece.keys - 1);
    return p.page_table ? p.page_table[piece.number * p.table_stride + (key >> Base::shift)] : piece.number;
  }

  // As PackedWarp::copy, with the page of the lane's key.
  __device__ void copy(const Piece& piece, int i, int page) const {
    if (1 << Base::shift >= kUnit) return Base::copy(piece, i, page);
    constexpr int kPieces = Place::kPieces;
    if constexpr (32 % kPieces == 0) {
      constexpr int kAtOnce = 32 / kPieces;  // rows
      const int lane = threadIdx.x % 32, key0 = unit(piece, i) * kUnit, at = lane % kPieces;
      uint16_t* k_tile = reinterpret_cast<uint16_t*>(ring + i % Shape::kStages * Shape::kStage);
      uint16_t* v_tile = k_tile + Shape::kKeys / 2;
#pragma unroll 1  // unrolled, it would take registers that some shapes do not have
      for (int row0 = 0; row0 < kUnit; row0 += kAtOnce) {
        const int row = row0 + lane / kPieces, slot = key0 + row & (1 << Base::shift) - 1;
        const int block = p.checked(__shfl_sync(0xffffffff, page, row));  //@ row_page
        const bool there = key0 + row < piece.keys;  //@ small_end
        cp_async_16(k_tile + Place::at(row, at * 8), p.k.at(block, slot, piece.kv_head) + at * (16 / sizeof(KV)), there);
        cp_async_16(v_tile + Place::at(row, at * 8), p.v.at(block, slot, piece.kv_head) + at * (16 / sizeof(KV)), there);
      }
    } else {
      uint16_t* k_tile = reinterpret_cast<uint16_t*>(ring + i % Shape::kStages * Shape::kStage);
      copy_scattered<Place>(k_tile, p.k, piece, unit(piece, i) * kUnit, page);
      copy_scattered<PlaceOfValue>(k_tile + Shape::kKeys / 2, p.v, piece, unit(piece, i) * kUnit, page);
    }
  }

  // The same of keys or values alone, whose rows may have any number of pieces.
  template <typename To>
  __device__ void copy_scattered(uint16_t* tile, const Rows<const KV>& from, const Piece& piece, int key0, int page) const {
    constexpr int kPieces = To::kPieces;
    static_assert(kUnit * kPieces % 32 == 0);  // all lanes shuffle
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kUnit * kPieces; i += 32) {
      const int row = i / kPieces, at = i % kPieces, slot = key0 + row & (1 << Base::shift) - 1;
      const int block = p.checked(__shfl_sync(0xffffffff, page, row));  //@ part_page
      const bool there = key0 + row < piece.keys;
      cp_async_16(tile + To::at(row, at * 8), from.at(block, slot, piece.kv_head) + at * (16 / sizeof(KV)), there);
    }
  }

  // As PackedWarp::copy_first and PackedWarp::start.
  template <int kFirst, int kLast>
  __device__ void copy_first(const Piece& piece) const {
    int pages[kLast - kFirst + 1];
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) pages[i - kFirst] = i < this->count(piece) ? look_up(piece, i) : 0;
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      if (i < this->count(piece)) copy(piece, i, pages[i - kFirst]);
      cp_async_commit();
    }
  }
  __device__ void start(const Piece& piece) const { copy_first<0, Base::kEarly>(piece); }

  // Overwrites the values of keys that no row sees with zeros, because they may be NaN.
  __device__ void clear_front(unsigned char* values, int rows) const {
    constexpr int kPieces = PlaceOfValue::kPieces;
    for (int i = threadIdx.x % 32; i < rows * kPieces; i += 32)
      *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(values) + PlaceOfValue::at(i / kPieces, i % kPieces * 8)) = uint4{};
    __syncwarp();
  }

  __device__ void multiply(const Piece& piece, int i) {
    const int lane = threadIdx.x % 32, key0 = unit(piece, i) * kUnit, first = first_key(p, scoring, piece.keys);
    unsigned char* stage = ring + i % Shape::kStages * Shape::kStage;
    const uint16_t *k = reinterpret_cast<const uint16_t*>(stage), *v = k + Shape::kKeys / 2;
    if (key0 < first) clear_front(stage + Shape::kKeys, first - key0);  //@ clear_front
    constexpr int kChains = kSlabs == 1 ? 2 : 1;  // independent chains of products
    float scores[kChains][kSlabs][4] = {};
#pragma unroll
    for (int step = 0; step < Shape::kKeyRow / 32; ++step) {
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

    // Whether some row may not see some key of the unit: among the new tokens, or where the last query's window begins.
    const bool edge = key0 + kUnit > piece.keys - p.new_tokens || key0 < scoring.first(piece.keys);
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
        for (int n = 0; n < kVDim / 4; ++n) sums[n / 4][s][n % 4] *= rescale[n % 2];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t two;
        round_to(reinterpret_cast<typename Vector<Operand>::Pair&>(two), mine[2 * half], mine[2 * half + 1]);
        exponentials[s][half] = movmatrix_trans(two);
      }
    }

#pragma unroll
    for (int j = 0; j < Shape::kValueRow / 32; ++j) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, v + PlaceOfValue::at(lane / 16 * 8 + lane % 8, 16 * j + lane / 8 % 2 * 8));
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
    copy_first<Base::kEarly, kAhead>(piece);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      online[s] = {};
#pragma unroll
      for (int n = 0; n < kVDim / 4; ++n) sums[n / 4][s][n % 4] = 0.0f;
    }
    this->prepare_q();
    const int units = this->count(piece);
    int next = kAhead < units ? look_up(piece, kAhead) : 0;
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      cp_async_wait<Shape::kStages - 2>();  //@ scored_arrived
      __syncwarp();  // the stage has arrived for all lanes, and all have multiplied the previous one
      const int ahead = i + kAhead, here = next;
      if (ahead + 1 < units) next = look_up(piece, ahead + 1);
      if (ahead < units) copy(piece, ahead, here);
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

// As for_shape. Heads of 128 in bfloat16 have tiles of 32 rows, too, so that 16 new tokens of a group of four heads read the keys
// twice. With float16 and fp8 such tiles would spill registers.
template <typename T, typename KV, typename Launch>
void for_scored_shape(const Decode<T, KV>& p, Launch launch) {
  require_vectors(p);
  for_dim(p.dim, [&]<int kDim>() {
    if (p.rows() <= 8) return launch.template operator()<PackedShape<T, KV, kDim, 1>>();
    if constexpr (kDim == 64 || (kDim == 128 && std::is_same_v<KV, BFloat16>)) {
      if (p.rows() > 16) return launch.template operator()<PackedShape<T, KV, kDim, 4>>();
    }
    launch.template operator()<PackedShape<T, KV, kDim, 2>>();
  });
}

}  // namespace minfer
