// Decodes weights from a piece of a row in shared memory to fragments of mma.m16n8k16, without a conversion to float.
//
// W is the 16-row operand, so that 8 rows of x cost what one does. Within a product, k may be in any order that both operands
// share: a lane takes the weights of its word, two to a register, in the order in which they are cheapest to extract. The
// fragments are integers, exact in either half type; a scale multiplies sums of 16 to 128 products, in fp32.
//
// From the PTX ISA: "Matrix Fragments for mma.m16n8k16", "lop3", "prmt".
#pragma once

#include <algorithm>

#include "cuda/mma.cuh"
#include "cuda/vector.cuh"
#include "quant_gemm.h"

namespace minfer {

// The base. With an integer q from 0 to 127 in its lower bits, the pattern is 128 + q in bfloat16 (where the last bit has the
// value 1) and 1024 + q in float16.
template <typename T>
constexpr uint32_t kBase = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;

// An integer up to 256 as a pair of T, twice the same.
template <typename T>
constexpr uint32_t two_of(int value) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    bits = 0x6400u + value;  // value - 1024: the bits above the base are those of the number
  } else {
    bits = 0x4300u + value;
  }
  return bits << 16 | bits;
}

template <typename T>
__device__ inline uint32_t minus(uint32_t a, uint32_t b) {
  using Pair = typename Vector<T>::Pair;
  const Pair found = __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(found);
}

template <typename T>
__device__ inline uint32_t times(uint32_t a, uint32_t b) {
  using Pair = typename Vector<T>::Pair;
  const Pair found = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(found);
}

// The two numbers in the lowest kBits bits of either half of a word, more by the base.
template <typename T, int kBits>
__device__ inline uint32_t two_above_base(uint32_t word) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  return mask_or(word, kMask << 16 | kMask, kBase<T>);
}

// The same, less `zero`.
template <typename T, int kBits>
__device__ inline uint32_t two_unsigned(uint32_t word, int zero) {
  return minus<T>(two_above_base<T, kBits>(word), two_of<T>(zero));
}

// The two signed bytes in the lower bytes of a word's halves. Each is a difference: base + the lower seven bits, less base +
// 128 if the sign bit is set and less base if not; in both types that bit of the pattern is worth 128.
template <typename T>
__device__ inline uint32_t two_signed(uint32_t word) {
  return minus<T>(mask_or(word, 0x007f007fu, kBase<T>), mask_or(word, 0x00800080u, kBase<T>));
}

// The two e4m3 in the same bytes. With sign, exponent and mantissa at their places in T, the number is 2^8 or 2^120 times too
// small, also if it is subnormal; to a NaN, whose lower seven bits are all set, is added what fills T's exponent.
template <typename T>
__device__ inline uint32_t two_e4m3(uint32_t word) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  const uint32_t rest = word & 0x007f007fu, nan = (rest + 0x00010001u) & 0x00800080u;
  const uint32_t placed = nan * (kHalf ? 0x80 : 0xf0) + (rest << (kHalf ? 7 : 4));
  return times<T>(mask_or(word << 8, 0x80008000u, placed), kHalf ? 0x5c005c00u : 0x7b807b80u);
}

// Of a word of four e4m3, those in bytes 0 and 2 and those in bytes 1 and 3, but that NaN becomes a finite number. `nan` gets
// the top bit of each byte that is one. For two pairs this takes 12 instructions, two_e4m3 18.
template <typename T>
__device__ inline void four_e4m3(uint32_t& even, uint32_t& odd, uint32_t& nan, uint32_t word) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kPlaces = kHalf ? 0x3f803f80u : 0x07f007f0u, kScale = kHalf ? 0x5c005c00u : 0x7b807b80u;
  even = times<T>(mask_or(word << 8, 0x80008000u, word << (kHalf ? 7 : 4) & kPlaces), kScale);
  odd = times<T>(mask_or(word, 0x80008000u, word >> (kHalf ? 1 : 4) & kPlaces), kScale);
  nan = mask_or((word & 0x7f7f7f7fu) + 0x01010101u, 0x80808080u, nan);
}

// A word at a multiple of 2 bytes.
__device__ inline uint32_t word_at(const uint8_t* p) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  return halves[0] | uint32_t(halves[1]) << 16;
}
__device__ inline uint32_t aligned_word_at(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ inline float aligned_half_at(const uint8_t* p) { return float(*reinterpret_cast<const __half*>(p)); }

constexpr int kPiece = 256;  // weights of a row that are copied at once

// The layout of a piece of a row in shared memory: kCopies times 16 bytes, in a slot of kSlot bytes, an odd multiple of 16, so
// that words of eight rows are in different banks. A piece of Q6_K, 210 bytes, may start anywhere in its first 16.
template <typename F>
struct Piece {
  static constexpr int kBytes = kPiece / F::kBlock * F::kBytes;
  static constexpr int kCopies = (kBytes + 15) / 16;
  static constexpr int kSlot = (kCopies + (kIsInt4<F> ? 1 : 0)) / 2 * 32 + 16;
  static constexpr int kGroups = kIsInt4<F> ? kPiece / F::kBlock : 0;  // their scales and zeros follow the weights
  static_assert(kBytes + kGroups * 4 <= kSlot && kCopies * 16 <= kSlot);
};

// How many products share a scale, and how many x are added up for a zero or a least value, 0 for none.
template <typename F>
constexpr int kSummed = kIsInt4<F> ? F::kBlock : std::is_same_v<F, Q4_K> ? 32 : 0;
template <typename F>
constexpr int kSums = kSummed<F> > 0 ? kPiece / std::max(kSummed<F>, 1) : 0;  // of a piece

// Where sums of x are at hand, and the products exact enough, the base stays in the weights: 128 times the sum of x goes with
// the zero. In float16, whose base is 1024, the fp32 sums would lose 7 more bits.
template <typename F, typename T>
constexpr bool kKeepsBase = std::is_same_v<T, __nv_bfloat16> && kSummed<F> > 0;

template <typename F, typename T>
__device__ inline uint32_t two_nibbles(uint32_t word, int zero) {
  return kKeepsBase<F, T> ? two_above_base<T, 4>(word) : two_unsigned<T, 4>(word, zero);
}

// Of a block of 32 weights, the eight that lane t = lane % 4 multiplies: pairs 0 and 1 in a first product of 16, 2 and 3 in a
// second. The pairs are, for int4, weights 8 t and 8 t + 4, 8 t + 1 and 8 t + 5, and so on; else 4 t and 4 t + 2, 4 t + 1 and
// 4 t + 3, and then the same 16 further. `nan`: of fp8 weights, see `four_e4m3`.
template <typename F, typename T>
__device__ inline void load_weights(uint32_t (&pairs)[4], uint32_t& nan, const uint8_t* piece, int block, int t) {
  if constexpr (kIsInt4<F>) {
    const uint32_t word = aligned_word_at(piece + block * 16 + t * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = two_nibbles<F, T>(word >> 4 * i, 8);
  } else if constexpr (std::is_same_v<F, Q4_0>) {
    const uint8_t* at = piece + block * 18 + 2 + t * 4;
    const uint32_t word = block % 2 ? aligned_word_at(at) : word_at(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = two_unsigned<T, 4>(word >> (i % 2 * 8 + i / 2 * 4), 8);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * 16 + t * 4;
      uint32_t word;
      if constexpr (std::is_same_v<F, Q4_K>)
        word = aligned_word_at(piece + 16 + block / 2 * 32 + at) >> block % 2 * 4;
      else if constexpr (std::is_same_v<F, Q6_K>)
        word = (word_at(piece + block / 4 * 64 + block % 2 * 32 + at) >> block % 4 / 2 * 4 & 0x0f0f0f0fu) |
               (word_at(piece + 128 + block / 4 * 32 + at) >> block % 4 * 2 & 0x03030303u) << 4;
      else if constexpr (std::is_same_v<F, Q8_0>)
        word = block % 2 ? aligned_word_at(piece + block * 34 + 2 + at) : word_at(piece + block * 34 + 2 + at);
      else
        word = aligned_word_at(piece + block * 32 + at);
      if constexpr (std::is_same_v<F, Fp8>) {
        four_e4m3<T>(pairs[half * 2], pairs[half * 2 + 1], nan, word);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t bytes = word >> 8 * i;
          uint32_t& pair = pairs[half * 2 + i];
          if constexpr (std::is_same_v<F, Q4_K>) pair = two_nibbles<F, T>(bytes, 0);
          else if constexpr (std::is_same_v<F, Q6_K>) pair = two_unsigned<T, 6>(bytes, 32);
          else if constexpr (std::is_same_v<F, Q8_0>) pair = two_signed<T>(bytes);
          else pair = two_e4m3<T>(bytes);
        }
      }
    }
  }
}

// The eight x of lane t of 32 in the order of `load_weights`. first and second: for int4 the x at 8 t and at 8 t + 4, else
// those at 4 t and at 16 + 4 t.
template <typename F>
__device__ inline uint4 in_order(uint2 first, uint2 second) {
  if constexpr (kIsInt4<F>)
    return {__byte_perm(first.x, second.x, 0x5410), __byte_perm(first.x, second.x, 0x7632),
            __byte_perm(first.y, second.y, 0x5410), __byte_perm(first.y, second.y, 0x7632)};
  else
    return {__byte_perm(first.x, first.y, 0x5410), __byte_perm(first.x, first.y, 0x7632),
            __byte_perm(second.x, second.y, 0x5410), __byte_perm(second.x, second.y, 0x7632)};
}

template <typename F, typename T>
__device__ inline uint4 ordered_x(const typename Product<F, T>::X* row, int t) {
  if constexpr (std::is_same_v<F, Fp8Both>) {  // as weights are, and as exact
    uint32_t pairs[4], unused;
    load_weights<F, T>(pairs, unused, row, 0, t);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  } else if constexpr (kIsInt4<F>) {
    const uint4 r = *reinterpret_cast<const uint4*>(row + t * 8);
    return in_order<F>({r.x, r.y}, {r.z, r.w});
  } else {
    return in_order<F>(*reinterpret_cast<const uint2*>(row + t * 4), *reinterpret_cast<const uint2*>(row + 16 + t * 4));
  }
}

// Sums the 256 x of a piece, of which each lane has eight: writes each sum of kSummed to `sums`, `stride` apart. Products with
// ones do it in 2 instructions and at most 3 more, where adding eight x and shuffling takes 24: column n of such a product is
// the sum over lanes 4 n to 4 n + 3.
template <typename F, typename T>
__device__ inline void add_up(float* sums, int stride, uint4 x, int lane) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
  float found[4] = {};
  mma_m16n8k16<T>(found, {kOnes, kOnes, kOnes, kOnes}, {x.x, x.y});
  mma_m16n8k16<T>(found, {kOnes, kOnes, kOnes, kOnes}, {x.z, x.w});
  if constexpr (kSummed<F> == 32) {
    if (lane < 4) sums[2 * lane * stride] = found[0], sums[(2 * lane + 1) * stride] = found[1];
  } else {
    constexpr int kLanes = kSummed<F> / 64;
    float sum = found[0] + found[1];
    if constexpr (kLanes == 2) sum += __shfl_xor_sync(0xffffffff, sum, 1);
    if (lane < 4 && lane % kLanes == 0) sums[lane / kLanes * stride] = sum;
  }
}

// `scale` multiplies the sums of products of a row of W, `least` the sum of the x themselves.
struct Factors {
  float scale, least;
};

// What a row's factors are made of, for those formats of which a piece has it in one place.
template <typename F, typename T>
struct RowFactors {
  static constexpr float kAbove = kKeepsBase<F, T> ? 128.0f : 0.0f;  // the base, where it stays in the weights
  uint32_t words[4];                                                 // int4: scales, then zeros
  float d, m;                                                        // q4_k: of all its scales and least values

  __device__ explicit RowFactors(const uint8_t* piece) {
    if constexpr (kIsInt4<F>) {
#pragma unroll
      for (int i = 0; i < Piece<F>::kGroups; i += 2)
        reinterpret_cast<uint2&>(words[i]) = *reinterpret_cast<const uint2*>(piece + kPiece / 2 + i * 4);
    } else if constexpr (std::is_same_v<F, Q4_K>) {  // 6 bits each, to a byte each: scales 0 to 3, 4 to 7, then least values
      const uint4 head = *reinterpret_cast<const uint4*>(piece);
      const __half2 both = reinterpret_cast<const __half2&>(head.x);
      d = __low2float(both), m = __high2float(both);
      words[0] = head.y & 0x3f3f3f3fu;
      words[1] = mask_or(head.w, 0x0f0f0f0fu, head.y >> 2 & 0x30303030u);
      words[2] = head.z & 0x3f3f3f3fu;
      words[3] = mask_or(head.w >> 4, 0x0f0f0f0fu, head.z >> 2 & 0x30303030u);
    }
  }

  __device__ T element(int i) const {
    const unsigned short bits = static_cast<unsigned short>(words[i / 2] >> i % 2 * 16);
    return reinterpret_cast<const T&>(bits);
  }

  // For 16 products: the first (half = 0) or the second 16 of a block of 32.
  __device__ Factors of(const uint8_t* piece, int block, int half) const {
    if constexpr (kIsInt4<F>) {
      const int group = block * 32 / F::kBlock;
      const float scale = float(element(group)), zero = float(element(Piece<F>::kGroups + group));  //@ zero
      return {scale, scale * ((kAbove > 0.0f ? -kAbove : 8.0f) - zero)};
    } else if constexpr (std::is_same_v<F, Q4_K>) {
      const float scale = d * static_cast<float>(words[block / 4] >> block % 4 * 8 & 255);
      return {scale, -m * static_cast<float>(words[2 + block / 4] >> block % 4 * 8 & 255) - kAbove * scale};
    } else if constexpr (std::is_same_v<F, Q6_K>) {
      return {aligned_half_at(piece + 208) * float(static_cast<int8_t>(piece[192 + block * 2 + half])), 0.0f};
    } else {
      return {aligned_half_at(piece + block * F::kBytes), 0.0f};
    }
  }
};

// Adds to `sums` the products of 16 rows of W with kTiles times 8 rows of x, over one piece. low and high: rows lane / 4 and
// lane / 4 + 8 of W, for this lane. x(tile, block) gives 32 x of row lane / 4 of a tile, ordered; x_sum(tile, group) gives, for
// rows 2 t and 2 t + 1 of the tile, the sums of the `group`th kSummed x.
template <typename F, typename T, int kTiles, typename X, typename XSum>
__device__ inline void multiply_piece(float (&sums)[kTiles][4], const uint8_t* low, const uint8_t* high, X x, XSum x_sum) {
  constexpr int kShared = kIsFp8<F> ? 0 : kIsInt4<F> ? F::kBlock / 32 : 1;  // blocks of 32 that share a scale; 0: all
  float parts[kTiles][4];
  const int t = threadIdx.x % 4;
  uint32_t nan[2] = {};
  const RowFactors<F, T> of_low(low), of_high(high);
#pragma unroll
  for (int block = 0; block < kPiece / 32; ++block) {
    uint32_t a[2][4];
    load_weights<F, T>(a[0], nan[0], low, block, t);
    load_weights<F, T>(a[1], nan[1], high, block, t);
    if constexpr (kShared > 0)
      if (block % kShared == 0)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i) parts[tile][i] = 0.0f;
    uint4 of_x[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) of_x[tile] = x(tile, block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 b = of_x[tile];
        mma_m16n8k16<T>(kShared > 0 ? parts[tile] : sums[tile],
                        {a[0][2 * half], a[1][2 * half], a[0][2 * half + 1], a[1][2 * half + 1]},
                        {half ? b.z : b.x, half ? b.w : b.y});
      }
      constexpr bool kSixteen = std::is_same_v<F, Q6_K>;
      if constexpr (kShared > 0) {
        if (!kSixteen && (half == 0 || block % kShared + 1 < kShared)) continue;
        const Factors of[2] = {of_low.of(low, block, half), of_high.of(high, block, half)};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          float2 total{};
          if constexpr (kSummed<F> > 0) total = x_sum(tile, block / kShared);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[tile][i] += of[i / 2].scale * parts[tile][i];
            if constexpr (kSummed<F> > 0) sums[tile][i] += of[i / 2].least * (i % 2 ? total.y : total.x);
            if constexpr (kSixteen) parts[tile][i] = 0.0f;
          }
        }
      }
    }
  }
  if constexpr (std::is_same_v<F, Fp8>)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned lanes = __ballot_sync(0xffffffff, nan[row] != 0);
      if (lanes >> (threadIdx.x % 32 / 4 * 4) & 15)  // all sums of a row with a NaN are NaN
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          sums[tile][2 * row] = sums[tile][2 * row + 1] = std::bit_cast<float>(0x7fffffffu);
    }
}

// The same number, which the compiler then keeps in a register. Without this it computes a lane's offsets anew for each piece.
__device__ inline int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A warp's copies of pieces of 16 rows of W. 8 or 16 neighbours copy from one row, so that a lane's addresses of a piece are a
// constant apart; a 9th or 17th copy of each row is for the first 16 lanes. With int4, a lane copies the scales of a row, and
// the next one its zeros. Addresses go on from piece to piece, which takes fewer instructions than to compute each anew.
template <typename F, typename T>
struct Copies {
  using Of = Piece<F>;
  static constexpr int kLanes = Of::kCopies < 14 ? 8 : 16, kStep = 32 / kLanes;  // of a row, and rows at once
  static_assert(Of::kCopies <= kLanes + 1);
  const uint8_t *from, *last;
  const T* scales;
  int64_t row_bytes;
  int rows;  // of W from the first of the 16 on
  int lane, row, to, scales_to;  // of these 16 and of a slot's bytes, where this lane copies first

  __device__ Copies(const Product<F, T>& p, int64_t row0, int piece, int lane) : lane(lane) {
    row = kept(lane / kLanes), to = kept(row * Of::kSlot + lane % kLanes * 16);
    scales_to = kept(lane / 2 * Of::kSlot + kPiece / 2 + lane % 2 * Of::kGroups * 2);
    row_bytes = int64_t(p.k / kPiece) * Of::kBytes;
    rows = static_cast<int>(p.n - row0);
    const uint8_t* w = p.weights.w + row0 * row_bytes;
    from = w + lane / kLanes * row_bytes + lane % kLanes * 16;
    last = w + lane % 16 * row_bytes + kLanes * 16;
    if constexpr (kIsInt4<F>)
      scales = (lane % 2 ? p.weights.zeros : p.weights.scales) + (row0 + lane / 2) * (p.k / kPiece) * Of::kGroups;
    skip(piece);
  }

  __device__ void skip(int64_t pieces) {
    from += pieces * Of::kBytes, last += pieces * Of::kBytes;
    if constexpr (kIsInt4<F>) scales += pieces * Of::kGroups;
  }

  // A piece of Q6_K may start at any multiple of 2, and is copied from a multiple of 16 on.
  __device__ static const uint8_t* start_of(const uint8_t* p) {
    if constexpr (Of::kBytes % 16 > 0) p -= reinterpret_cast<uintptr_t>(p) % 16;
    return p;
  }

  // Copies the present piece to slots. Rows beyond the last become zeros; nothing is read from their addresses.
  __device__ void start(uint8_t* slots) const {
    if (kLanes <= Of::kCopies || lane % kLanes < Of::kCopies)
#pragma unroll
      for (int i = 0; i < 16; i += kStep)
        cp_async_16(slots + to + i * Of::kSlot, start_of(from) + i * row_bytes, row < rows - i);
    if (kLanes < Of::kCopies && lane < 16) cp_async_16(slots + lane * Of::kSlot + kLanes * 16, start_of(last), lane < rows);
    if constexpr (kIsInt4<F>) cp_async_few<Of::kGroups * 2>(slots + scales_to, scales, lane / 2 < rows);
  }
};

// Where a piece begins in its slot.
template <typename F>
__device__ inline int start_in_slot(int piece) {
  return static_cast<int>(int64_t(piece) * Piece<F>::kBytes % 16);
}

// Throws unless rows of W and x are whole pieces, which begin at multiples of 16 bytes.
template <typename F, typename T>
void require_pieces(const Product<F, T>& p) {
  STD_TORCH_CHECK(p.k % kPiece == 0, "quant_gemm: w must have rows of a multiple of ", kPiece, " weights, got ", p.k);
  check_pieces(p.weights.w, int64_t(p.k / kPiece) * Piece<F>::kBytes, int64_t(p.k / kPiece) * Piece<F>::kBytes,
               "quant_gemm: w");
  check_pieces(p.x, p.k, p.k, "quant_gemm: x");
  if constexpr (kIsInt4<F>) {
    check_pieces(p.weights.scales, Piece<F>::kGroups, Piece<F>::kGroups, "quant_gemm: scales", Piece<F>::kGroups * 2);
    check_pieces(p.weights.zeros, Piece<F>::kGroups, Piece<F>::kGroups, "quant_gemm: zeros", Piece<F>::kGroups * 2);
  }
}

}  // namespace minfer
