// What a Hopper block of mla_decode is made of: rows of the cache in shared memory, which a producer thread fills by TMA, and
// two consumer warpgroups, each with half of the columns of out.
//
// A block computes 64 query rows over some keys, 64 keys at a time. Blocks of keys go to two stages in turn, and warpgroup w
// has the scores of those in stage w. It leaves their exponentials in the stage, in the place of the rotated keys, which nobody
// else needs. Each warpgroup then multiplies the exponentials of both by its 256 columns of the latents. So while one warpgroup
// computes a softmax, the other one has the tensor cores. FlashMLA's division of out (DeepSeek, 2025), with the blocks in
// strict order.
#pragma once

#include "cuda/attention/parts.cuh"
#include "cuda/hopper.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tma_heads.cuh"
#include "cuda/wgmma_registers.cuh"
#include "mla_decode.h"

namespace minfer {

constexpr int kRows = 64, kKeys = 64, kConsumers = 2, kStages = kConsumers, kConsumerThreads = kConsumers * 128;
constexpr int kThreads = kConsumerThreads + 128, kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kSlab = 64 * 64, kSlabs = kRow / 64, kHalf = kLatent / 2, kSlabsOfHalf = kHalf / 64;  // kSlab in elements
// A stage is released in three parts: the columns of either warpgroup, and the rotated keys. It is loaded slab by slab.
constexpr int kParts = kConsumers + 1, kRotated = kConsumers;
// Named barriers: the exponentials in a stage are ready; threads of one warpgroup; threads of both.
constexpr int kReady = 1, kAlone = kReady + kStages, kBoth = kAlone + kConsumers;

// Blocks of 64 keys from `begin` to before `end`, for 64 query rows from row0 on.
struct Piece {
  int number, row0, keys, begin, end;
};

// A block's shared memory: q and each stage in nine slabs of 64 rows by 64 columns, in the 128-byte swizzle. Of a cluster of
// two, the blocks have the rows of two tiles of query rows, and the same keys: each copies half of the rows of the cache to
// both.
template <typename T, int kCluster>
struct LatentTiles {
  static constexpr int kTile = kSlabs * kSlab;
  static constexpr int kFloats = (kStages + kConsumers) * kRows, kBarriers = kStages * (kSlabs + kParts);
  static constexpr int kBytes = (1 + kStages) * kTile * sizeof(T) + kFloats * sizeof(float) + kBarriers * sizeof(uint64_t);

  T *q, *stages;
  float *base, *sums;  // of each stage's rows; of each warpgroup's
  uint64_t *full, *empty;

  __device__ explicit LatentTiles(unsigned char* shared)
      : q(reinterpret_cast<T*>(shared)), stages(q + kTile), base(reinterpret_cast<float*>(stages + kStages * kTile)),
        sums(base + kStages * kRows), full(reinterpret_cast<uint64_t*>(sums + kConsumers * kRows)),
        empty(full + kStages * kSlabs) {}

  __device__ T* slab(int stage, int number) const { return stages + stage * kTile + number * kSlab; }

  // The i-th slab of a stage in the order in which slabs are loaded and multiplied. The columns of the warpgroup that has the
  // scores come first, because it gives them back first; the rotated keys come last.
  __device__ static int ordered(int stage, int i) { return i < kSlabs - 1 ? i ^ stage * kSlabsOfHalf : i; }

  // One thread.
  __device__ void init() const {
    for (int i = 0; i < kStages * kSlabs; ++i) barrier_init(full + i, 1);
    // A lane of each of four warps, in each block, gives a part of a stage back.
    for (int i = 0; i < kStages * kParts; ++i) barrier_init(empty + i, 4 * kCluster);
    barrier_init_fence();
  }

  // What the producer does for a piece. It looks up a page one iteration ahead, so that no copy waits for the table.
  __device__ void load(const Mla<T>& p, const HeadsMap& map, const Piece& piece, Ring<kStages>& ring) const {
    const auto block_of = [&](int i) { return i < piece.end ? p.block_of(piece.number, i * kKeys) : 0; };
    int next = block_of(piece.begin);
#pragma unroll 1
    for (int i = piece.begin; i < piece.end; ++i, ring.advance()) {
      const int block = next, slot = p.slot_of(i * kKeys);
      next = block_of(i + 1);
      for (int at = 0; at < kSlabs; ++at) {
        const int s = ordered(ring.stage, at);
        uint64_t* there = full + ring.stage * kSlabs + s;
        if (at % kSlabsOfHalf == 0) barrier_wait(empty + ring.stage * kParts + s / kSlabsOfHalf, ring.parity ^ 1);
        barrier_expect(there, kSlab * sizeof(T));
        if constexpr (kCluster == 1) {
          tma_load_heads(slab(ring.stage, s), map, there, s * 64, 0, slot, block);
        } else {
          const int row = cluster_rank() * (kKeys / kCluster);
          tma_load_heads_multicast(slab(ring.stage, s) + row * 64, map, there, s * 64, 0, slot + row, block,
                                   (1 << kCluster) - 1);  //@ multicast
        }
      }
    }
  }
};

// Exchanges, between lanes whose numbers differ in bit kBit, `high` of the lower lane with `low` of the upper one.
template <int kBit, typename Word>
__device__ inline void exchange(Word& low, Word& high) {
  const bool upper = threadIdx.x & kBit;
  const Word got = __shfl_xor_sync(0xffffffff, upper ? low : high, kBit);
  (upper ? low : high) = got;
}

// A consumer warpgroup: 64 rows by 256 columns of out, not yet divided by the sums of exponentials.
template <typename T, int kCluster>
struct HalfRows {
  using Tiles = LatentTiles<T, kCluster>;
  const Tiles& tiles;
  const Mla<T>& p;
  const int self;      // 0 or 1: which half, and whose stage
  const float factor;  // a score times this is an exponent of 2
  int done = 0;        // blocks of keys in earlier pieces: stages and phases continue after them
  OnlineRows online;
  float out[kHalf / 2];

  __device__ HalfRows(const Tiles& tiles, const Mla<T>& p)
      : tiles(tiles), p(p), self(warpgroup_index()), factor(p.scale * kLog2E) {}

  __device__ static int row_of(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

  // Both warpgroups copy the rows of q, four threads a row. Rows beyond the last become zero.
  __device__ void load_q(const Piece& piece) const {
    static_assert(kConsumerThreads == 4 * kRows);
    const int row = threadIdx.x / 4, first = threadIdx.x % 4;
    const bool there = piece.row0 + row < p.rows();
    const T* from = p.query_at(piece.number, there ? piece.row0 + row : 0) + first * 8;
    T* to = tiles.q + row * 64;
#pragma unroll
    for (int i = 0; i < kRow / 32; ++i)
      cp_async_16(to + i / 2 * kSlab + ((first + i % 2 * 4) ^ row % 8) * 8, from + i * 32, there);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async();
    named_barrier_sync(kBoth, kConsumerThreads);
  }

  // Waits for a slab of its own stage.
  __device__ void wait_full(int slab, uint32_t parity) const { barrier_wait(tiles.full + self * kSlabs + slab, parity); }

  // Releases a part of a stage: one lane of each warp tells the producer, in a cluster the producers of both blocks.
  __device__ void release(int stage, int part) const {
    uint64_t* empty = tiles.empty + stage * kParts + part;
    if constexpr (kCluster > 1) {
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty, threadIdx.x % 32);  //@ producers
    } else {
      if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
  }

  // Zeros the rows behind the sequence's last key: they may be NaN, and 0 times NaN is NaN.
  __device__ void clear_tail(int left, uint32_t parity) const {
    if (left >= kKeys) return;
    for (int slab = 0; slab < kSlabs; ++slab) wait_full(slab, parity);
    const int pieces = (kKeys - left) * 8;  // of 16 bytes; the swizzle exchanges them within a row
    for (int slab = 0; slab < kSlabs; ++slab)
      for (int i = threadIdx.x % 128; i < pieces; i += 128)
        reinterpret_cast<uint4*>(tiles.slab(self, slab) + left * 64)[i] = uint4{};
    fence_async();
    named_barrier_sync(kAlone + self, 128);
  }

  // Starts scores = q kᵀ with the keys of its own stage, a slab at a time, as soon as it has arrived; of slabs kBegin to kEnd.
  template <int kBegin, int kEnd>
  __device__ void start_scores(float (&scores)[kKeys / 2], uint32_t parity) const {
    const uint64_t rows = tile_descriptor(tiles.q, 16, 1024), keys = tile_descriptor(tiles.slab(self, 0), 16, 1024);
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const int slab = Tiles::ordered(self, i);
      wait_full(slab, parity);  //@ slab_full
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = slab * (kSlab / 8) + step * 2;  // a step is 32 bytes of a row; descriptors count 16 bytes
        wgmma<T, false>(scores, rows + at, keys + at, i + step > 0);
      }
      wgmma_commit();
    }
  }

  // This warpgroup's columns of a stage, as wgmma's operand B. 16 keys are 16 rows of 128 bytes.
  __device__ uint64_t latents(int stage) const {
    return tile_descriptor(tiles.slab(stage, self * kSlabsOfHalf), kSlab * sizeof(T), 1024);
  }

  __device__ void mask(float (&scores)[kKeys / 2], const Piece& piece, int key0) const {
    if (key0 + kKeys <= p.seen(0, piece.keys)) return;
    int seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) seen[r] = min(piece.keys, p.seen((piece.row0 + row_of(r)) / p.heads, piece.keys));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      if (key0 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= seen[i / 2 % 2]) scores[i] = -INFINITY;
  }

  // Leaves the exponentials and the base in its own stage for the other warpgroup.
  // The other one sees them after kReady: these 128 threads arrive behind their writes, its 128 threads wait. The next
  // exponentials and base of this stage overwrite nothing that it still reads. Within a piece, its threads arrive at the kReady
  // of its own next block behind those reads, and this warpgroup waits there, in start_others, before it publishes again. So no
  // barrier is arrived at twice before the others have waited, either. Between pieces, all threads wait at kBoth.
  __device__ void publish(const uint32_t (&exponentials)[kKeys / 16][4]) const {
    //@ keys_multiplied
    named_barrier_sync(kAlone + self, 128);  // all warps have multiplied the keys, in whose place exponentials come
    const int lane = threadIdx.x % 32;
    T* row = tiles.slab(self, kSlabs - 1) + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 64;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) stmatrix_x4(row + ((n * 2 + lane / 16) ^ lane % 8) * 8, exponentials[n]);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) tiles.base[self * kRows + row_of(r)] = online.base[r];
    }
    fence_async();
    named_barrier_arrive(kReady + self, kConsumerThreads);
  }

  // Starts out += exponentials latents, with the exponentials and the latents of the other warpgroup's stage.
  __device__ void start_others() {
    const int other = 1 - self;
    named_barrier_sync(kReady + other, kConsumerThreads);
    const float next[2] = {tiles.base[other * kRows + row_of(0)], tiles.base[other * kRows + row_of(1)]};
    float rescale[2];
    if (online.follow(next, factor, rescale)) scale_rows(out, rescale);  //@ follow
    const uint64_t exponentials = tile_descriptor(tiles.slab(other, kSlabs - 1), 16, 1024), values = latents(other);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma<T, true>(out, exponentials + step * 2, values + step * 128, true);
    wgmma_commit();
  }
  __device__ void release_others() const {
    release(1 - self, self);
    release(1 - self, kRotated);
  }

  __device__ void start_own(const uint32_t (&exponentials)[kKeys / 16][4]) {
    const uint64_t values = latents(self);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma_registers<T, true>(out, exponentials[step], values + step * 128, true);
    wgmma_commit();
  }

  // Computes one piece. The two warpgroups take its blocks of keys in turn. For its scores a warpgroup first multiplies the
  // columns that it freed itself, because they are loaded first. Then it starts two products without a wait between them: the
  // other warpgroup's exponentials by their values, and the rest of its own scores.
  __device__ void attend(const Piece& piece) {
    const int count = piece.end - piece.begin;
    load_q(piece);
    online = OnlineRows{};
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) out[i] = 0.0f;
    int i = (self - done) & 1;
#pragma unroll 1
    for (; i < count; i += 2) {
      const int key0 = (piece.begin + i) * kKeys;
      float scores[kKeys / 2], rescale[2];
      uint32_t exponentials[kKeys / 16][4];
      const uint32_t parity = (done + i) / 2 & 1;
      clear_tail(piece.keys - key0, parity);  //@ clear_tail
      start_scores<0, kSlabsOfHalf>(scores, parity);
      if (i > 0) start_others();
      start_scores<kSlabsOfHalf, kSlabs>(scores, parity);
      //@ product_done
      wgmma_wait_for<kSlabs - kSlabsOfHalf>(out);  // all but the scores that were started last, a group for each slab
      if (i > 0) release_others();
      wgmma_wait_for<0>(scores);
      mask(scores, piece, key0);
      const bool grows = online.template add_rounded<T, false>(scores, exponentials, factor, rescale);
      if (grows) scale_rows(out, rescale);  //@ own_rescale
      start_own(exponentials);  //@ start_own
      publish(exponentials);  // under the product  //@ publish
      wgmma_wait_for<0>(out);
      release(self, self);
    }
    if (i == count) {  // the last block is the other's
      start_others();
      wgmma_wait_for<0>(out);
      release_others();
    }
    done += count;
  }

  // The sums of powers of two rows of this thread. Both warpgroups call it. kBoth orders these writes and reads; another kBoth
  // at the end of each piece orders the reads and the next piece's writes.
  __device__ void totals(float (&total)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mine = quad_sum(online.sum[r]);
      if (threadIdx.x % 4 == 0) tiles.sums[self * kRows + row_of(r)] = mine;
    }
    named_barrier_sync(kBoth, kConsumerThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = tiles.sums[row_of(r)] + tiles.sums[kRows + row_of(r)];  //@ both_sums
  }

  // Writes the rows that exist to out, divided by their sums; 0 for rows that saw no key. The lanes of a quad transpose, so
  // that each stores 16 bytes and the quad 64.
  __device__ void store(const Piece& piece) const {
    float total[2];
    totals(total);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = piece.row0 + row_of(r), lane = threadIdx.x % 4;
      const bool there = row < p.rows();
      const float inverse = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
      T* to = p.out.at(piece.number, there ? row / p.heads : 0, there ? row % p.heads : 0) + self * kHalf + lane * 8;
#pragma unroll
      for (int j = 0; j < kHalf / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (j + i) * 4 + r * 2;
          round_to(reinterpret_cast<typename Vector<T>::Pair&>(words[i]), out[at] * inverse, out[at + 1] * inverse);
        }
        exchange<1>(words[0], words[1]), exchange<1>(words[2], words[3]);
        exchange<2>(words[0], words[2]), exchange<2>(words[1], words[3]);
        if (there) *reinterpret_cast<uint4*>(to + j * 8) = {words[0], words[1], words[2], words[3]};
      }
    }
  }

  // Writes the rows as a part of an item, not divided by their sums: add_up does that.
  __device__ void leave(const Piece& piece, const Parts& parts, int slot) const {
    float total[2];
    totals(total);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r), lane = threadIdx.x % 4;
      const bool there = piece.row0 + row < p.rows();
      float* to = parts.sums_of(slot, row) + self * kHalf + lane % 2 * 8 + lane / 2 * 4;
#pragma unroll
      for (int j = 0; j < kHalf / 8; j += 2) {
        const int at = j * 4 + r * 2;
        float4 four{out[at], out[at + 1], out[at + 4], out[at + 5]};
        exchange<1>(four.x, four.z), exchange<1>(four.y, four.w);
        if (there) *reinterpret_cast<float4*>(to + j * 8) = four;
      }
      if (there && self == 0 && lane == 0) parts.stats_at(slot, row) = {online.base[r] * factor, total[r]};
    }
  }
};

}  // namespace minfer
