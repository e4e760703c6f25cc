// v14_stream_k: v13 whose last wave, when it is not full, is divided by steps in k, so that all SMs end together.
// Idea: 8192x8192 is 1,024 tiles for 66 clusters, fifteen and a half waves, for which v13 takes sixteen. Here each tile of the
// last wave belongs to one cluster, its owner, which multiplies the first steps in k; the clusters without a tile, the helpers,
// share the other steps, across tile boundaries. They multiply them before their last whole tile, so that the partial sums are
// in memory long before an owner adds them, and meanwhile all other clusters are at one k, which keeps the L2 useful.
// After Osama et al., "Stream-K", PPoPP 2023. Clusters keep pace, so that what one copies is still in the L2 for the others.
// Expected: over v13 what its last wave leaves idle, 3 % at 8192, less the partial-sum exchange: a helper takes 4,000 cycles to
// write the sums of a tile, an owner 2,000 to add them. With more than two tiles to a helper that is all there was to gain, and
// the kernel falls back to v13.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 817.8 TFLOP/s cold, 692.8 steady; 104.5 % and 103.7 % of torch.
#include <cmath>

#include "cuda/counters.cuh"
#include "cuda/gemm/cooperative.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kParts = 4, kPart = kBlockM * kBlockN / kParts;  // of a block's partial sums, each of so many
constexpr int kPieces = kPart / (kConsumers * 128 * 4);        // of a thread's, 16 bytes each
constexpr int kPace = kMostCounters - 5;                       // the first counter of Pace, behind Mail's
constexpr int kWriters = kConsumers * 128 + 32;                // threads that write sums, and the warp that reports it

// Which tiles are shared, and who multiplies them: the last, and the first clusters.
struct Deal {
  int whole, shared;  // tiles; each of the shared ones is the own of one cluster
  int helpers;        // clusters; the owners come after them
  int steps, own;     // of a tile, and those of them that its owner multiplies, the first

  // A helper's share: of the others of all shared tiles, one tile after the other.
  __device__ int begin_of(int helper) const { return shared * (steps - own) * helper / helpers; }

  // Calls f(tile, begin, end) for each tile that a helper has steps of.
  template <typename F>
  __device__ void for_slices(int helper, F f) const {
    const int slice = steps - own, end = begin_of(helper + 1);
    for (int at = begin_of(helper); at < end;) {
      const int tile = at / slice, first = at - tile * slice, last = min(slice, first + end - at);
      f(whole + tile, own + first, own + last);
      at += last - first;
    }
  }

  // Calls f(helper) for each of those that a tile has, in the order of k.
  template <typename F>
  __device__ void for_helpers(int tile, F f) const {
    const int slice = steps - own, begin = (tile - whole) * slice;
    int helper = begin * helpers / (shared * slice);
    while (begin_of(helper + 1) <= begin) ++helper;
    for (; helper < helpers && begin_of(helper) < begin + slice; ++helper) f(helper);
  }
};

// How helpers' sums come to owners: a place in memory for each slice, and a flag, zero before and after each launch.
struct Mail {
  float* places;
  unsigned* counters;

  // A helper's next tile, and a tile's next helper, has the next number.
  __device__ static int number(const Deal& deal, int tile, int helper) {
    return (tile - deal.whole + helper) * kCluster + cluster_rank();  //@ helper
  }
  __device__ float* place(int number) const { return places + int64_t(number) * kParts * kPart; }
  __device__ unsigned* flag(int number) const { return counters + number; }
};

// Keeps clusters together, so that what one copies is still in the L2 when another comes to it. Nothing holds them at one
// step in k but the memory they wait for, and when a wave's operands are more than the L2 has, as at 16384, they drift until
// each brings its own from DRAM. Here each says when it is 32 steps further, and waits until all have said so of the 32
// before; but not for long, and if that was in vain, because they do not all run at once, never again.
struct Pace {
  static constexpr int kSteps = 32, kPatience = 100;  // polls, of half a microsecond

  unsigned* counters;  // four in turn, and of the clusters that have ended; zero before and after each launch
  unsigned clusters, times = 0;
  bool waits = true;

  __device__ Pace(unsigned* counters) : counters(counters), clusters(gridDim.x / kCluster) {}

  __device__ void step() {
    counter_add(counters + times % 4);
    if (times > 0 && waits) {
      const unsigned before = times - 1, all = (before / 4 + 1) * clusters;
      int polls = 0;
      while (counter_read(counters + before % 4) < all && ++polls < kPatience) {}
      waits = polls < kPatience;
    }
    ++times;
  }

  __device__ void end() {
    __threadfence();  // no count of ours comes after it
    if (atomicInc(counters + 4, clusters - 1) < clusters - 1) return;
    for (int i = 0; i < 4; ++i) counters[i] = 0;
  }
};

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1)
    multiply(const __grid_constant__ CooperativeMaps maps, Gemm<T> g, const __grid_constant__ Deal deal, Mail mail) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Stages<T, kLayout> stages(shared);
  const WorkTileScheduler<kBlockM, kBlockN, kCluster, kGroup> tiles(g);
  const int cluster = tiles.tile, clusters = tiles.stride;
  const bool helps = cluster < deal.helpers;
  // Calls multiply(tile, backwards) for each of this cluster's whole ones, help(backwards) before the last of a helper, and
  // add(tile, backwards) for the one that it shares.
  const auto for_tiles = [&](auto multiply, auto help, auto add) {
    bool backwards = false;
    for (int tile = cluster; tile < deal.whole; tile += clusters, backwards = !backwards) {
      if (helps && tile + clusters >= deal.whole) help(backwards), backwards = !backwards;
      multiply(tile, backwards);
    }
    if (!helps && cluster < deal.helpers + deal.shared) add(deal.whole + cluster - deal.helpers, backwards);
  };

  if (warpgroup_index() == kConsumers) {
    registers_down<40>();
    const int warp = threadIdx.x / 32 - kConsumers * 4;
    if (elected(kConsumers * 4)) {  // copies
      Pace pace(mail.counters + kPace);
      const auto load = [&](int tile, int begin, int end, bool backwards, bool together = false) {
        stages.load(maps, tiles.origin_of(tile), begin, end, backwards, cluster_rank(),
                    [&](int step) {
                      if (together && cluster_rank() == 0 && step % Pace::kSteps == Pace::kSteps - 1) pace.step();
                    });
      };
      const int together = deal.whole / clusters * clusters - (deal.helpers > 0 ? clusters : 0);  // tiles of full waves
      for_tiles([&](int tile, bool backwards) { load(tile, 0, deal.steps, backwards, tile < together); },
                [&](bool backwards) {
                  deal.for_slices(cluster, [&](int tile, int begin, int end) { load(tile, begin, end, backwards); });
                },
                [&](int tile, bool backwards) {
                  load(tile, 0, deal.own, backwards);
                  deal.for_helpers(tile, [&](int helper) {
                    const int number = Mail::number(deal, tile, helper);
                    flag_take(mail.flag(number));
                    fence_async_global();  //@ fence_global
                    for (int part = 0; part < kParts; ++part, stages.ring.advance()) {
                      uint64_t* full = stages.wait_empty();
                      barrier_expect(full, kPart * sizeof(float));
                      bulk_load(stages.stage(), mail.place(number) + part * kPart, kPart * sizeof(float), full);
                    }
                  });
                });
      if (cluster_rank() == 0) pace.end();
    } else if (helps && warp == 1) {  // waits until sums are in memory, for those that wrote them to go on
      deal.for_slices(cluster, [&](int tile, int, int) {
        warps_sync<kWriters>();  //@ flag_after
        if (threadIdx.x % 32 == 0) flag_raise(mail.flag(Mail::number(deal, tile, cluster)));
        __syncwarp();
      });
    }
  } else {
    registers_up<232>();
    Sums<T, kLayout> sums;
    float4* pieces = reinterpret_cast<float4*>(&sums.tile.sums);
    //@ Scopes<Timeline> scopes(timeline);
    const int mine = threadIdx.x / 32 * kPieces * 32 + threadIdx.x % 32;  // and each 32nd after: this thread's of a part
    for_tiles(
        [&](int tile, bool) {
          //@ scopes.begin();
          sums.multiply(stages, maps, 0, deal.steps);
          //@ scopes.end(kWhole + kScopes * tile);
          sums.take(g, tiles.origin_of(tile));
        },
        [&](bool) {
          deal.for_slices(cluster, [&](int tile, int begin, int end) {
            //@ scopes.begin();
            sums.multiply(stages, maps, begin, end);
            //@ scopes.end(kHelp + kScopes * tile), scopes.begin();
            float4* place = reinterpret_cast<float4*>(mail.place(Mail::number(deal, tile, cluster))) + mine;
#pragma unroll
            for (int i = 0; i < kParts * kPieces; ++i)
              __stcg(place + i / kPieces * (kPart / 4) + i % kPieces * 32, pieces[i]);
            warps_sync<kWriters>();  //@ sums_written
            //@ scopes.end(kGive + kScopes * tile);
          });
        },
        [&](int tile, bool) {
          //@ scopes.begin();
          sums.multiply(stages, maps, 0, deal.own);
          //@ scopes.end(kOwn + kScopes * tile);
          deal.for_helpers(tile, [&](int) {
#pragma unroll
            for (int part = 0; part < kParts; ++part, stages.ring.advance()) {
              //@ scopes.begin();
              stages.wait_full();  //@ sums_arrived
              //@ scopes.end(kWait + kScopes * tile), scopes.begin();
              const float4* theirs = reinterpret_cast<const float4*>(stages.stage()) + mine;
#pragma unroll
              for (int i = 0; i < kPieces; ++i) {
                float4& piece = pieces[part * kPieces + i];
                const float4 more = theirs[i * 32];
                piece.x += more.x, piece.y += more.y, piece.z += more.z, piece.w += more.w;
              }
              __syncwarp();
              stages.release(stages.ring.stage);
              //@ scopes.end(kAdd + kScopes * tile);
            }
          });
          sums.take(g, tiles.origin_of(tile));
        });
    sums.finish(stages, maps);
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

// Shares the tiles of the last wave, if that saves anything.
inline Deal deal_out(int tiles, int clusters, int steps) {
  constexpr float kGive = 2, kTake = 1.5;  // in steps
  const Deal none{tiles, 0, 0, steps, steps};
  const int rest = tiles % clusters, idle = clusters - rest;
  if (tiles < clusters || rest == 0 || rest > 2 * idle || steps > 1 << 18) return none;
  const int most = std::max(1, int(std::sqrt(steps / kTake)) - 1);  // helpers of a tile: more, and adding takes longest
  const int helpers = std::min(idle, most * rest);
  // All end at once: own + takes = (steps - own) each + gives, where shares end within tiles.
  const float each = float(rest) / helpers, takes = kTake * (1 + 1 / each), gives = kGive * (1 + each);
  const int own = std::max(1, int(std::ceil((steps * each + gives - takes) / (1 + each))));
  return own + takes >= steps - 1 ? none : Deal{tiles - rest, rest, helpers, steps, own};
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = Stages<T, kLayout>::kBytes;
  const auto kernel = multiply<T, kLayout>;
  const CooperativeMaps maps = make_cooperative_maps(g);
  const auto [tiles, clusters] = persistent_grid<kBlockM, kBlockN, kCluster>(kernel, kThreads, kBytes, g);
  const Deal deal = deal_out(tiles, clusters, ceil_div(g.k, kBlockK));
  const auto places = scratch_words(int64_t(deal.shared + deal.helpers) * kCluster * kParts * kPart);
  const Mail mail{static_cast<float*>(places.mutable_data_ptr()), counters_of(g.stream)};
  STD_CUDA_CHECK(
      launch_clusters(kernel, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g, deal, mail));
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v14_stream_k, minfer::launch)
