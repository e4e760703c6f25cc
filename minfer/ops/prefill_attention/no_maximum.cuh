// What v06_no_maximum and v10_paged_boxes share: the work of their consumer warpgroups.
#pragma once

#include "cuda/counters.cuh"
#include "hopper_attention.cuh"

namespace minfer::no_maximum {

constexpr int64_t kL2Bytes = 8 << 20;                    // of an H200's 60 MB
constexpr int kTurnBarrier = kTailBarrier + kConsumers;  // and one more
constexpr int kSlots = 4;                                // tiles that are taken and not yet stored
constexpr int kFewRegisters = 40, kMostRegisters = 232;

// As many tiles of q as shared memory has room for. Beside keys of 192, blocks of 112 keys or more would spill.
template <typename T, int kDim, int kDimV>
using TilesOf = Tiles<T, kDim, kDimV, kDim <= 128 ? 2 : 1, kDim <= 128 ? 128 : 96>;

// Tiles that the producer has taken, for the consumers to read.
struct Slots {
  Work work[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};

// The parities of the phases of stages. A tile always begins with stage 0, so that stages are known at compile time; after a
// tile with an odd number of blocks, stage 1 is left out.
struct Phases {
  uint32_t bits = 0;
  __device__ uint32_t parity(int stage) const { return bits >> stage & 1; }
  __device__ void flip(int stage) { bits ^= 1 << stage; }
};

// kInHalves: when a row's base grows, out is multiplied twice by the root of the factor (OnlineRows::add_in_halves).
template <typename T, int kDim, int kDimV, bool kInHalves = false>
struct Consumer {
  using Tile = TilesOf<T, kDim, kDimV>;
  using Rows = Rows64<Tile>;
  using Exponentials = typename Rows::Exponentials;
  using Scores = typename Rows::Scores;
  static constexpr int kBytes = Tile::kBytes + sizeof(Slots);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  const Tile& tile;
  const Attention<T>& p;
  Rows rows;
  Slots* const slots;
  Phases keys, values;
  unsigned of_q = 0;  // which tile of q

  __device__ Consumer(const Tile& tile, const Attention<T>& p, Slots* slots) : tile(tile), p(p), rows(tile, p), slots(slots) {}

  // Waits for this warpgroup's turn to start products; ends the turn.
  __device__ void begin_turn() const { named_barrier_sync(kTurnBarrier + rows.warpgroup, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - rows.warpgroup, 256); }

  // Waits for keys; except for a tile's first block, values of the block before have come with them into the other stage.
  __device__ void wait_keys(int stage) {
    barrier_wait(tile.full_k + stage, keys.parity(stage));
    keys.flip(stage);
  }
  // Waits for the values of a tile's last block, which come alone.
  __device__ void wait_values(int stage) {
    barrier_wait(tile.full_v + stage, values.parity(stage));
    values.flip(stage);
  }

  // Waits for the scores of a block, and makes them exponentials. Returns whether out must be multiplied with `rescale`.
  template <bool kFirst, bool kPlain>
  __device__ bool finish_scores(Scores& scores, Exponentials& exponentials, const Work& w, int block, int stage,
                                float (&rescale)[2]) {
    wgmma_wait_for<kFirst ? 0 : 1>(scores);
    rows.release(tile.empty_k + stage);
    if constexpr (!kPlain) rows.mask(scores, w, block);
    if constexpr (kInHalves)
      return rows.online.template add_in_halves<T, kFirst>(scores, exponentials, rows.factor, rescale);
    else
      return rows.online.template add_rounded<T, kFirst>(scores, exponentials, rows.factor, rescale);
  }

  __device__ void finish_out(int stage) {
    wgmma_wait_for<0>(rows.out);
    rows.release(tile.empty_v + stage);
  }

  // Starts the scores of `block`, whose keys are in `stage`, and the product with the exponentials of the one before. The
  // softmax of these scores overlaps that product and those of the other warpgroup. The exponentials of two blocks have
  // registers of their own, because the product reads the one while the softmax writes the other.
  template <int kStage, bool kPlain>
  __device__ void step(Scores& scores, Exponentials (&exponentials)[2], const Work& w, int block) {
    float rescale[2];
    wait_keys(kStage);
    begin_turn();
    rows.start_scores(scores, kStage, of_q);
    rows.start_out(exponentials[1 - kStage], 1 - kStage, block + 2 < w.blocks);  //@ next_scores
    end_turn();
    const bool grows = finish_scores<false, kPlain>(scores, exponentials[kStage], w, block, kStage, rescale);
    finish_out(1 - kStage);
    if (grows) scale_rows(rows.out, rescale);  //@ rescale
    if constexpr (kInHalves)
      if (grows) scale_rows(rows.out, rescale);
  }

  // The last product of a tile.
  template <int kStage>
  __device__ void add_last(const Exponentials& exponentials, const Work& w) {
    rows.release(tile.empty_q + of_q);
    wait_values(kStage);
    begin_turn();
    rows.start_out(exponentials, kStage, w.blocks > 1);
    end_turn();
    finish_out(kStage);
  }

  // All blocks but the first one. Plain scores are neither capped nor hidden; they have a loop of their own, because the code
  // for others would stand between its instructions and miss the instruction cache.
  template <bool kPlain>
  __device__ void add_blocks(Scores& scores, Exponentials (&exponentials)[2], const Work& w) {
    int block = w.blocks - 1;
#pragma unroll 1
    while (true) {
      if (--block < 0) {
        add_last<0>(exponentials[0], w);
        break;
      }
      step<1, kPlain>(scores, exponentials, w, block);
      if (--block < 0) {
        add_last<1>(exponentials[1], w);
        break;
      }
      step<0, kPlain>(scores, exponentials, w, block);
    }
  }

  // Whether no block but the first one is masked.
  __device__ bool is_plain(const Work& w) const {
    const Span clear = rows.clear_blocks(w);
    return p.softcap <= 0.0f && clear.begin <= 0 && clear.end >= w.blocks - 1;
  }

  __device__ void attend(const AttentionMaps& maps) {
    if (rows.warpgroup == 1) end_turn();  // the first turn is the other one's
    for (unsigned number = 0;; ++number) {
      const unsigned slot = number % kSlots;
      barrier_wait(slots->full + slot, number / kSlots % 2);
      const Work& w = slots->work[slot];  // stays in shared memory, and takes no registers
      if (!w.exists()) break;
      of_q = __shfl_sync(0xffffffff, number % Tile::kTilesOfQ, 0);  // so that descriptors are in uniform registers
      barrier_wait(tile.full_q + of_q, number / Tile::kTilesOfQ % 2);  //@ queries_arrived
      add_tile(w);
      rows.store(maps, w);
      __syncwarp();
      rows.release(slots->empty + slot);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    if (rows.warpgroup == 0) begin_turn();  // takes the turn that the other one has ended, so that none is left
  }

  __device__ void add_tile(const Work& w) {
    Scores scores;
    Exponentials exponentials[2];
    float rescale[2];
    wait_keys(0);
    rows.start_scores(scores, 0, of_q);
    rows.online = OnlineRows{};
    finish_scores<true, false>(scores, exponentials[0], w, w.blocks - 1, 0, rescale);
    if (rows.has_tail(w, w.blocks - 1)) {
      if (w.blocks > 1) barrier_wait(tile.full_k + 1, keys.parity(1));
      else barrier_wait(tile.full_v, values.parity(0));
      rows.clear_tail(w, w.blocks - 1, 0);
    }
    if (is_plain(w)) add_blocks<true>(scores, exponentials, w);
    else add_blocks<false>(scores, exponentials, w);
  }
};

}  // namespace minfer::no_maximum
