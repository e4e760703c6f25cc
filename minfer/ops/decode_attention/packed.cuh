// The mainloop of the packed kernels: query rows that share a key-value head are the columns of tensor-core products.
//
// A warp takes a unit of 16 keys at a time, which lie in one page. Each warp has its own ring of stages in shared memory, and a
// stage is the keys and values of one unit, so that warps synchronise only at the end of a piece of work. Scores never leave
// registers: scoresᵀ = k qᵀ has 16 keys and 8 rows of q, and outᵀ = vᵀ exponentialsᵀ has 16 columns of v and the same 8 rows.
#pragma once

#include "cuda/attention/parts.cuh"
#include "cuda/fp8.cuh"
#include "cuda/shared_tile.cuh"
#include "cuda/softmax.cuh"
#include "decode_attention.h"

namespace minfer {

constexpr int kUnit = 16;  // keys

// kWhole: a block has an H200's SM to itself, with the warps and the rings of two blocks.
template <typename T_, typename KV_, int kDim_, int kSlabs_, bool kWhole = false>
struct PackedShape {
  using T = T_;
  using KV = KV_;
  static constexpr bool kFp8 = !std::is_same_v<KV, T>;
  using Operand = std::conditional_t<kFp8, Half, T>;  // of the products: fp16 holds every e4m3 value, one instruction converts
  using Whole = PackedShape<T, KV, kDim_, kSlabs_, true>;
  static constexpr int kDim = kDim_, kVDim = v_dim_of(kDim), kSlabs = kSlabs_, kRows = 8 * kSlabs;
  // Of all warps of a block. Without kWhole an SM of an L40S holds one block, an H200's two.
  static constexpr int kRingBytes = (kWhole ? 192 : 96) << 10;
  // Bytes of the row of a key and of a value, and of those of a unit.
  static constexpr int kKeyRow = kDim * sizeof(KV), kValueRow = kVDim * sizeof(KV);
  static constexpr int kKeys = kUnit * kKeyRow, kValues = kUnit * kValueRow, kStage = kKeys + kValues;
  using Place = Swizzled<kKeyRow / 2>;  // of 16-bit words: two elements of fp8
  using PlaceOfValue = Swizzled<kValueRow / 2>;
  static_assert(rows_in_different_banks<Place>() && rows_in_different_banks<PlaceOfValue>() && kKeys % 128 == 0);
  // Eight warps where their sums fit 128 registers: a short row gives a warp as many instructions as a longer one.
  static constexpr int kWarps = (kKeyRow > 256 ? 2 : kKeyRow > 128 || kDim * kSlabs > 128 ? 4 : 8) * (kWhole ? 2 : 1);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kRingBytes / (kWarps * kStage) < 8 ? kRingBytes / (kWarps * kStage) : 8;
  static constexpr int kWarpBytes = kStages * kStage, kBytes = kWarps * kWarpBytes;
  // The last kLeave stages take the sums in the end, while the first kEarly are filled for the next piece.
  static constexpr int kSums = kRows * kVDim * int(sizeof(float)), kLeave = (kSums + kStage - 1) / kStage;
  static constexpr int kEarly = kStages - (kLeave > 1 ? kLeave : 1);
  static constexpr int kResident = kWhole ? 1 : kMostShared >= 2 * (kRingBytes + (4 << 10)) ? 2 : 1;
  static constexpr int kBatch = kThreads > 128 ? 8 : 16;  // of parts that are added at a time, as registers allow
  static_assert(kStages >= 2 && kEarly >= 1);
};

// Units [begin, end) of a sequence's keys, for the rows from row0 on that share a key-value head.
struct Piece {
  int number, kv_head, row0, keys, begin, end;
};

// The running sums of a lane's two columns of scoresᵀ, as OnlineRows in `cuda/softmax.cuh` has them of rows. The eight lanes of
// a column share the exponent of its base. They look for the maximum only when an exponential is beyond 2^kSlack.
struct OnlineColumns {
  static constexpr float kSlack = 8.0f, kNone = -3.402823466e38f;  // no key yet: no score has a smaller exponent
  float exponent[2] = {kNone, kNone}, sum[2] = {};

  // Replaces scores of two keys by their exponentials 2^(factor score - exponent). Returns as OnlineRows::add does.
  __device__ bool add(float (&scores)[4], const float (&factor)[2], float (&rescale)[2]) {
    float highest[2];
    bool beyond = false;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      highest[c] = fmaxf(scores[c], scores[c + 2]);
      beyond |= fmaf(highest[c], factor[c], -exponent[c]) > kSlack;  // false for -inf of a key that is not seen
    }
    const bool grows = __ballot_sync(0xffffffff, beyond) != 0;
    if (grows) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
          highest[c] = fmaxf(highest[c], __shfl_xor_sync(0xffffffff, highest[c], lanes));  //@ lanes_maximum
        const float next = highest[c] * factor[c];
        rescale[c] = 1.0f;
        if (next - exponent[c] > kSlack) rescale[c] = exp2_approx(exponent[c] - next), exponent[c] = next;
        sum[c] *= rescale[c];
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scores[n] = exp2_approx(fmaf(scores[n], factor[n % 2], -exponent[n % 2]));
      sum[n % 2] += scores[n];
    }
    return grows;
  }
};

// A warp of a block that attends to pieces, one after the other: `start` and `run` for each, then `leave`, before which the
// next piece may be started.
template <typename Shape>
struct PackedWarp {
  using T = typename Shape::T;
  using KV = typename Shape::KV;
  using Operand = typename Shape::Operand;
  using Place = typename Shape::Place;
  using PlaceOfValue = typename Shape::PlaceOfValue;
  static constexpr int kSlabs = Shape::kSlabs, kDim = Shape::kDim, kVDim = Shape::kVDim;

  const Decode<T, KV>& p;
  unsigned char* ring;
  int shift;  // a key's page is key >> shift; without pages it is page 0
  uint32_t q[kDim / 16][kSlabs][2];
  float factor[kSlabs][2];  // of a score to the exponent of 2
  float sums[kVDim / 16][kSlabs][4];
  OnlineColumns online[kSlabs];

  __device__ PackedWarp(const Decode<T, KV>& p, unsigned char* shared)
      : p(p), ring(shared + threadIdx.x / 32 * Shape::kWarpBytes), shift(p.page_table ? __ffs(p.slots) - 1 : 30) {}

  // The first of the two columns of q in register r of a B fragment of 16 columns. With an fp8 cache the columns have the
  // order in which bytes of keys become fragments: a lane's four bytes are its two pairs.
  __device__ static int column_of_q(int r) {
    const int t = threadIdx.x % 4;
    return Shape::kFp8 ? 4 * t + 2 * r : 2 * t + 8 * r;
  }

  // The column of out for the lower (half 0) or upper half of a tile of 16.
  __device__ static int column_of_out(int tile, int half) {
    const int g = threadIdx.x % 32 / 4;
    return 16 * tile + (Shape::kFp8 ? 2 * g + half : 8 * half + g);
  }

  // Starts loading the rows of q; rows beyond the last are zero.
  __device__ void load_q(int number, int kv_head, int row0) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      const int row = row0 + 8 * i + threadIdx.x % 32 / 4;
      const bool there = row < p.rows();
      const int query = there ? row / p.group() : 0;
      const T* from = p.q.at(number, query, kv_head * p.group() + (there ? row % p.group() : 0));
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          q[step][i][r] = there ? *reinterpret_cast<const uint32_t*>(from + 16 * step + column_of_q(r)) : 0;
    }
  }

  // Makes loaded rows operands. A row of bfloat16 that becomes float16 is divided by a power of 2, so that its largest element
  // is between 1 and 2; the factor of its scores makes good for it.
  __device__ void prepare_q() {
    const float common = p.scale * p.scale_of_k() * kLog2E;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      factor[i][0] = factor[i][1] = common;
      if constexpr (!std::is_same_v<Operand, T>) {
        const auto low = [](uint32_t two) { return __uint_as_float(two << 16); };  // of two numbers in bfloat16
        const auto high = [](uint32_t two) { return __uint_as_float(two & 0xffff0000); };
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const uint32_t two = q[n / 2][i][n % 2];
          largest = fmaxf(largest, fmaxf(fabsf(low(two)), fabsf(high(two))));
        }
        const int exponent = int(__float_as_uint(quad_max(largest)) >> 23);
        const int kept = min(max(exponent, 1), 253);
        const float scale = __uint_as_float(unsigned(254 - kept) << 23), unscale = __uint_as_float(unsigned(kept) << 23);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const uint32_t two = q[n / 2][i][n % 2];
          typename Vector<Operand>::Pair rounded;
          round_to(rounded, low(two) * scale, high(two) * scale);
          q[n / 2][i][n % 2] = reinterpret_cast<const uint32_t&>(rounded);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) factor[i][c] *= __shfl_sync(0xffffffff, unscale, (threadIdx.x % 4 * 2 + c) * 4);
      }
    }
  }

  __device__ int unit(const Piece& piece, int i) const { return piece.begin + int(threadIdx.x / 32) + i * Shape::kWarps; }
  __device__ int count(const Piece& piece) const {
    return max(0, (piece.end - unit(piece, 0) + Shape::kWarps - 1) / Shape::kWarps);
  }
  // Where unit i lies: its page as the table has it, or its sequence.
  __device__ int look_up(const Piece& piece, int i) const {
    return p.page_table ? p.page_table[piece.number * p.table_stride + (unit(piece, i) * kUnit >> shift)] : piece.number;
  }

  // Starts copying unit i, of which `page` was looked up; keys beyond the last are zero and are not read.
  __device__ void copy(const Piece& piece, int i, int page) const {
    constexpr int kPieces = Place::kPieces;
    const int lane = threadIdx.x % 32, key0 = unit(piece, i) * kUnit, left = piece.keys - key0;
    if constexpr (32 % kPieces == 0) {  // then rows of v are as long
      constexpr int kAtOnce = 32 / kPieces;  // rows
      const int block = p.checked(page), slot = (key0 & (1 << shift) - 1) + lane / kPieces;
      const int at = lane % kPieces;
      const KV* k = p.k.at(block, slot, piece.kv_head) + at * (16 / sizeof(KV));
      const KV* v = p.v.at(block, slot, piece.kv_head) + at * (16 / sizeof(KV));
      uint16_t* k_tile = reinterpret_cast<uint16_t*>(ring + i % Shape::kStages * Shape::kStage);
      uint16_t* v_tile = k_tile + Shape::kKeys / 2;
#pragma unroll
      for (int row0 = 0; row0 < kUnit; row0 += kAtOnce) {
        const int row = row0 + lane / kPieces;
        cp_async_16(k_tile + Place::at(row, at * 8), k + row0 * p.k.of_inner, row < left);  //@ unit_end
      }
#pragma unroll
      for (int row0 = 0; row0 < kUnit; row0 += kAtOnce) {
        const int row = row0 + lane / kPieces;
        cp_async_16(v_tile + Place::at(row, at * 8), v + row0 * p.v.of_inner, row < left);
      }
    } else {
      const int block = p.checked(page), slot = key0 & (1 << shift) - 1;
      uint16_t* k_tile = reinterpret_cast<uint16_t*>(ring + i % Shape::kStages * Shape::kStage);
      copy_rows<Place>(k_tile, p.k.at(block, slot, piece.kv_head), p.k.of_inner, left);
      copy_rows<PlaceOfValue>(k_tile + Shape::kKeys / 2, p.v.at(block, slot, piece.kv_head), p.v.of_inner, left);
    }
  }

  // Starts copying the keys, or the values, of a unit: rows that are `stride` apart and may have any number of pieces. Lane l
  // copies pieces l, l + 32 and so on of all rows.
  template <typename To>
  __device__ static void copy_rows(uint16_t* tile, const KV* rows, int64_t stride, int left) {
    static_assert(kUnit * To::kPieces % 32 == 0);
#pragma unroll
    for (int first = 0; first < kUnit * To::kPieces; first += 32) {
      const int number = first + threadIdx.x % 32, row = number / To::kPieces, at = number % To::kPieces;
      uint16_t* to = tile + To::at(row, at * 8);  //@ swizzled_part
      cp_async_16(to, rows + row * stride + at * (16 / sizeof(KV)), row < left);  //@ part_of_row
    }
  }

  // Starts copying units [kFirst, kLast), each a group; an empty group where there is no unit, so that the number of groups in
  // flight is constant.
  template <int kFirst, int kLast>
  __device__ void copy_first(const Piece& piece) const {
    int pages[kLast - kFirst + 1];
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) pages[i - kFirst] = i < count(piece) ? look_up(piece, i) : 0;
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      if (i < count(piece)) copy(piece, i, pages[i - kFirst]);
      cp_async_commit();
    }
  }

  // Starts the copies that do not touch the last kLeave stages.
  static constexpr int kAhead = Shape::kStages - 1, kEarly = Shape::kEarly < kAhead ? Shape::kEarly : kAhead;
  __device__ void start(const Piece& piece) const { copy_first<0, kEarly>(piece); }

  __device__ void multiply(const Piece& piece, int i) {
    const int lane = threadIdx.x % 32, key0 = unit(piece, i) * kUnit;
    const uint16_t* k = reinterpret_cast<const uint16_t*>(ring + i % Shape::kStages * Shape::kStage);
    const uint16_t* v = k + Shape::kKeys / 2;
    constexpr int kChains = kSlabs == 1 ? 2 : 1;  // of products that wait for each other
    float scores[kChains][kSlabs][4] = {};
#pragma unroll
    for (int step = 0; step < Shape::kKeyRow / 32; ++step) {
      uint32_t a[4];  // keys 0 to 7 and 8 to 15 of 8 words, and of the next 8
      ldmatrix_x4(a, k + Place::at(lane % 16, 16 * step + lane / 16 * 8));
      if constexpr (Shape::kFp8) {  // 32 columns
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

    const bool edge = key0 + kUnit > p.seen(0, piece.keys);  // some row may not see some key
    uint32_t exponentials[kSlabs][2];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      float(&mine)[4] = scores[0][s];
      if constexpr (kChains == 2) {
#pragma unroll
        for (int n = 0; n < 4; ++n) mine[n] += scores[1][s][n];
      }
      if (edge) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = (piece.row0 + 8 * s + lane % 4 * 2 + c) / p.group(), key = key0 + lane / 4;
          const int seen = min(piece.keys, p.seen(query, piece.keys));  //@ seen
          if (key >= seen) mine[c] = -INFINITY;
          if (key + 8 >= seen) mine[c + 2] = -INFINITY;
        }
      }
      float rescale[2];
      if (online[s].add(mine, factor[s], rescale)) {
#pragma unroll
        for (int n = 0; n < kVDim / 4; ++n) sums[n / 4][s][n % 4] *= rescale[n % 2];
      }
      using Pair = typename Vector<Operand>::Pair;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t two;
        round_to(reinterpret_cast<Pair&>(two), mine[2 * half], mine[2 * half + 1]);
        exponentials[s][half] = movmatrix_trans(two);
      }
    }

#pragma unroll
    for (int j = 0; j < Shape::kValueRow / 32; ++j) {
      uint32_t a[4];  // keys 0 to 7 of 8 words and of the next 8; keys 8 to 15 of these
      ldmatrix_x4_trans(a, v + PlaceOfValue::at(lane / 16 * 8 + lane % 8, 16 * j + lane / 8 % 2 * 8));
      if constexpr (Shape::kFp8) {  // a word has two columns of a key: those of two keys become a pair of each column
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

  // Attends to every kWarps-th unit of a piece that was started and whose q was loaded. It looks up the page of a unit one
  // iteration before the copy of that unit starts, so that no copy waits for the table.
  __device__ void run(const Piece& piece) {
    copy_first<kEarly, kAhead>(piece);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      online[s] = {};
#pragma unroll
      for (int n = 0; n < kVDim / 4; ++n) sums[n / 4][s][n % 4] = 0.0f;
    }
    prepare_q();
    const int units = count(piece);
    int next = kAhead < units ? look_up(piece, kAhead) : 0;
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      cp_async_wait<Shape::kStages - 2>();  //@ stage_arrived
      __syncwarp();  // the stage has arrived for all lanes, and all have multiplied the previous one
      const int ahead = i + kAhead, here = next;
      if (ahead + 1 < units) next = look_up(piece, ahead + 1);  //@ next_page
      if (ahead < units) copy(piece, ahead, here);
      cp_async_commit();
      multiply(piece, i);
    }
    __syncwarp();  // all lanes have multiplied the last unit
  }

  // The element of the sums that a warp leaves. Rows of a lane's neighbours lie in different banks.
  __device__ static int place(int row, int column) { return row * kVDim + (column ^ row / 2 % 4 * 8); }
  __device__ static float* left_by(unsigned char* shared, int warp) {
    return reinterpret_cast<float*>(shared + (warp + 1) * Shape::kWarpBytes - Shape::kLeave * Shape::kStage);
  }

  // Writes the sums and their stats for `merge` to read.
  __device__ void leave(unsigned char* shared, float2* stats, int rows) const {
    const int lane = threadIdx.x % 32;
    float* to = left_by(shared, threadIdx.x / 32);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * s + lane % 4 * 2 + c;
        float total = online[s].sum[c];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(0xffffffff, total, lanes);
        if (row >= rows) continue;
        if (lane < 4) stats[row] = {total > 0.0f ? online[s].exponent[c] : -INFINITY, total};
#pragma unroll
        for (int n = 0; n < kVDim / 8; ++n) to[place(row, column_of_out(n / 2, n % 2))] = sums[n / 2][s][n % 2 * 2 + c];
      }
  }
};

// Adds what the warps of a block have left of so many rows; the whole block calls it. Calls write(row, column, Merged) for four
// columns of each row at a time.
template <typename Shape, typename Write>
__device__ void add_warps(unsigned char* shared, const float2 (&stats)[Shape::kWarps][Shape::kRows], int rows, Write write) {
  using Warp = PackedWarp<Shape>;
  constexpr int kPieces = Shape::kVDim / 4;
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kPieces; i += Shape::kThreads) {
    const int row = i / kPieces, column = i % kPieces * 4;
    const auto sums_of = [&](int warp) {
      return *reinterpret_cast<const float4*>(Warp::left_by(shared, warp) + Warp::place(row, column));
    };
    write(row, column, merge<Shape::kWarps>(Shape::kWarps, [&](int warp) { return stats[warp][row]; }, sums_of));
  }
}

// Calls launch.operator()<PackedShape>() for the problem's rows: tiles of 8, 16 or 32, as registers allow.
template <int kDim, typename T, typename KV, typename Launch>
void for_rows(const Decode<T, KV>& p, Launch launch) {
  if (p.rows() <= 8) return launch.template operator()<PackedShape<T, KV, kDim, 1>>();
  if constexpr (kDim <= 64) {
    if (p.rows() > 16) return launch.template operator()<PackedShape<T, KV, kDim, 4>>();
  }
  launch.template operator()<PackedShape<T, KV, kDim, 2>>();
}

// The same, for every head_dim.
template <typename T, typename KV, typename Launch>
void for_shape(const Decode<T, KV>& p, Launch launch) {
  require_vectors(p);
  for_dim(p.dim, [&]<int kDim>() { for_rows<kDim>(p, launch); });
}

}  // namespace minfer
