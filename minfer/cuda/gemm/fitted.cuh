// A kernel for tiles of many heights, with the operands of wgmma swapped: the 64 rows of an instruction are columns of B, and
// its columns are rows of A. So the height of a tile may be any multiple of 8.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/elect.cuh"
#include "cuda/gemm/fitted_anywhere.cuh"
#include "cuda/gemm/fitted_choice.h"
#include "cuda/gemm/fitted_tile.cuh"
#include "cuda/gemm/promoted.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/wgmma_by_columns.cuh"

namespace minfer {

constexpr int kTwice = 2048;  // rows of the product in a group of tiles (`grouped`)

// How a launch divides a product.
struct Division {
  int halvings;  // how often k is halved, into 1, 2 or 4 parts; a group has one of them
  Group group;
  int down, across;  // groups of tiles
};

// What a thread does with a sum before it is stored: here nothing. A finish is made for columns `col` and col + 8. Its call
// operator gets a sum, and whether the sum is of the second of these columns. With two Bs, `combine(sum1, sum2,
// second)` has made that sum. Other problems derive from Gemm and have a finish of their own.
struct AsItIs {
  template <typename Problem>
  __device__ AsItIs(const Problem&, int /*col*/) {}
  __device__ float operator()(float sum, bool /*second*/) const { return sum; }
};

// `a_last` copies the last rows of A, in smaller boxes. `b_other` copies the second B or, with one B, the last columns in TN.
struct FittedMaps : Maps {
  TensorMap a_last, b_other;
};

template <typename Of, typename Finish>
__global__ void __launch_bounds__(Of::kThreads, 1)
    multiply(const __grid_constant__ FittedMaps maps, typename Of::Problem g, Division division) {
  using T = typename Of::T;
  using Out = typename Of::Out;
  constexpr int kSharing = Of::kSharing, kConsumers = Of::kConsumers, kWriters = Of::kWriters;
  constexpr bool kMovesRegisters = kConsumers > 1;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  Out* out = reinterpret_cast<Out*>(stages + Of::kStages * Of::kElements);
  uint64_t* full = reinterpret_cast<uint64_t*>(out + Of::kOut);
  uint64_t* empty = full + Of::kStages;  // of all blocks to which this one copies
  if (threadIdx.x == 0) {
    tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.a_last), tma_prefetch(maps.b_other);
    for (int stage = 0; stage < Of::kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, division.group.mates() * kConsumers * 4);
    if (!Of::kAnywhere) tma_prefetch(maps.c);
  }
  barrier_init_fence();
  cluster_sync_relaxed();

  const int halvings = division.halvings, parts = 1 << halvings, blocks = kSharing * parts;
  const int rank = cluster_rank(), first = rank / kSharing * kSharing, part = rank / kSharing;
  const Group group = division.group;
  const int x_in_group = (rank - first) % group.across, y_in_group = (rank - first) / group.across;
  const int all = (g.k + kBlockK - 1) / kBlockK, begin = all * part >> halvings, end = all * (part + 1) >> halvings;
  const int high = Of::kM * group.down, wide = Of::kColumns * group.across;
  const int tiles = division.down * division.across, clusters = gridDim.x / blocks, warpgroup = warpgroup_index();
  // If all tiles run at once, they are numbered row by row: the L2 is then read less (seen where blocks share rows of A).
  const int rows_of_tiles = tiles <= clusters ? 1 : max(1, kTwice / high);
  const auto for_tiles = [&](auto f) {
    bool backwards = false;  // true for every other tile: it then begins with operands that the L2 still has
    for (int tile = blockIdx.x / blocks; tile < tiles; tile += clusters, backwards = !backwards) {
      const int2 place = grouped(rows_of_tiles, tile, division.down, division.across);
      f(place.x * high + y_in_group * Of::kM, place.y * wide + x_in_group * Of::kColumns, backwards);
    }
  };

  Ring<Of::kStages> ring;
  if (warpgroup == kConsumers) {
    if constexpr (kMovesRegisters) registers_down<40>();
    if (elected(kConsumers * 4)) for_tiles([&](int row, int col, bool backwards) {
      const Inside rows(max(0, min(Of::kM, g.m - row)), group.across), cols(max(0, min(Of::kColumns, g.n - col)), group.down);
      const TensorMap& map_a = rows.size == Of::kM ? maps.a : maps.a_last;  //@ map_of_last_rows
      const bool fewer_columns = !Of::kSlabs && cols.size < Of::kN;
      const int of_row = (1 << group.across) - 1 << rank - x_in_group;  // the blocks that get the same A  //@ to_both
      const int of_column = (group.down > 1 ? 1 << group.across | 1 : 1) << first + x_in_group;  // the same B  //@ to_column
      const int bytes = rows.pieces * rows.piece * kBlockK * sizeof(T) + Of::bytes_of_b(cols);
#pragma unroll 1  // not unrolled: a cold kernel loads its instructions from memory
      for (int step = begin; step < end; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        T* stage = stages + ring.stage * Of::kElements;
        uint64_t* filled = full + ring.stage;
        const int k = (backwards ? begin + end - 1 - step : step) * kBlockK;
        const auto own_a = [&](T* box, int x, int y) { tma_load(box, map_a, filled, x, y); };
        const auto map_b = [&](bool second) -> const TensorMap& {
          return (Of::kTwo ? second : fewer_columns) ? maps.b_other : maps.b;  //@ map_of_b
        };
        const auto own_b = [&](T* box, int x, int y, bool second) { tma_load(box, map_b(second), filled, x, y); };
        const auto shared_a = [&](T* box, int x, int y) { tma_load_multicast(box, map_a, filled, x, y, of_row); };
        const auto shared_b = [&](T* box, int x, int y, bool second) {
          tma_load_multicast(box, map_b(second), filled, x, y, of_column);
        };
        barrier_expect(filled, bytes);
        if (kSharing > 1 && group.across > 1) Of::load_a(stage, row, k, rows, x_in_group, shared_a);
        else Of::load_a(stage, row, k, rows, 0, own_a);
        if (kSharing > 1 && !Of::kAnywhere && group.down > 1) Of::template load_b<2>(stage, col, k, cols, y_in_group, shared_b);
        else Of::template load_b<1>(stage, col, k, cols, 0, own_b);
      }
    });
    __syncwarp();
    if (parts > 1) cluster_sync();
  } else {
    if constexpr (kMovesRegisters) registers_up<(kConsumers == 2 ? 232 : 152)>();
    const int row_of_group = Of::kSplitsColumns ? 0 : warpgroup * Of::kHigh;
    const int b_of_group = Of::kSplitsColumns ? warpgroup * Of::kWide * 64 : 0;
    const int col_of_group = Of::kTwo ? b_of_group / 2 : b_of_group;
    constexpr int kWideOut = Of::kTwo ? Of::kWide / 2 : Of::kWide;
    // Element i of sums[w] is in column 64 w + 16 warp + lane / 4, plus 8 for i % 4 >= 2, and in row 8 (i / 4) + 2 (lane % 4)
    // + i % 2 of the warpgroup's. So 16 consecutive elements are 32 rows.
    alignas(16) float sums[Of::kWide][Of::kHigh / 2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Out* mine = out + warpgroup * (Of::kBuffers * Of::kBatch * kBox);
    auto* scales = reinterpret_cast<typename Of::Scales*>(empty + Of::kStages) + warpgroup;  // with promoted sums
    int batches = 0;

    // The warps of a warpgroup together write a box, rows of 128 bytes in the 128-byte swizzle. `down` is the
    // box's first row, counted from the warpgroup's first row.
    const auto write = [&](Out* box, const float(&x)[Of::kAtOnce], const Finish& finish, int down) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = x + half * 8 + 2 * i;
          float first = finish(two[0], i % 2), second = finish(two[1], i % 2);  //@ finish
          if constexpr (Of::kPromoted) {
            const int of_first = down + half * 16 + i / 2 * 8 + lane % 4 * 2;
            const float2 of_rows = *reinterpret_cast<const float2*>(scales->of_row + of_first);
            first *= of_rows.x, second *= of_rows.y;  //@ scales_of_rows
          }
          const Pair<Out> pair{Out(first), Out(second)};
          memcpy(&bits[i], &pair, 4);
        }
        const int to = half * 16 + lane % 8 + lane / 16 * 8, piece = warp % 4 * 2 + lane / 8 % 2;
        stmatrix_x4_transposed(box + to * 64 + (piece ^ lane % 8) * 8, bits);  //@ place_in_box
      }
    };
    // Waits until TMA has read the next buffer, and returns it.
    const auto next_batch = [&] {
      if (threadIdx.x % 128 == 0) tma_store_wait<Of::kBuffers - 1>();  //@ box_read
      named_barrier_sync(2 + warpgroup, 128);
      return mine + batches++ % Of::kBuffers * (Of::kBatch * kBox);
    };
    const auto batch_written = [&] {
      fence_async();  //@ fence_of_box
      named_barrier_sync(2 + warpgroup, 128);  //@ box_written
    };
    // Stores one box of the product: 32 rows from top + down on, and all 64 columns from `col` on.
    const auto store = [&](const float(&x)[Of::kAtOnce], const Finish& finish, int top, int down, int col) {
      const int row = top + down;
      if (row >= g.m || col >= g.n) return;
      if constexpr (Of::kAnywhere) {
        Out* box = mine + batches++ % Of::kBuffers * kBox;
        write(box, x, finish, down);
        named_barrier_sync(2 + warpgroup, 128);  // the other box is read, too: its readers have come here  //@ box_there
        store_anywhere(g, box, row, col);
      } else {
        Out* box = next_batch();
        write(box, x, finish, down);
        batch_written();
        if (threadIdx.x % 128 == 0) tma_store(maps.c, box, col, row), tma_store_commit();
      }
    };
    const auto finish_of = [&](int w, int col) {
      const int own = warp % 4 * 16 + lane / 4;
      if constexpr (Of::kPromoted) {
        return Finish(scales->of_column + w * 64 + own);  //@ scales_of_columns
      } else {
        return Finish(g, col + w * 64 + col_of_group + own);  //@ columns
      }
    };
    const auto release = [&](int stage) {  // to the producers that copy to this block
      if (lane >= group.mates()) return;
      const bool in_row = lane < group.across;
      barrier_arrive_at(empty + stage, in_row ? rank - x_in_group + lane : first + x_in_group + (1 - y_in_group) * group.across);
    };

    for_tiles([&](int row, int col, bool) {
      const auto columns_of = [&](int stage) {
        const T* b = stages + stage * Of::kElements + b_of_group * kBlockK;
        return tile_descriptor(b, Of::kTN ? 16 : kSlab * sizeof(T), 1024);
      };
      const auto rows_of = [&](int stage) {
        return tile_descriptor(stages + stage * Of::kElements + Of::kB + row_of_group * kBlockK, 16, 1024);
      };
      constexpr int kOfSlab = kSlab * sizeof(T) / 16;  // descriptors count 16 bytes
      if constexpr (Of::kPromoted) {
        const auto start = [&](float(&part)[Of::kHigh / 2], int stage, int w) {
          const uint64_t cols = columns_of(stage) + w * kOfSlab, rows = rows_of(stage);  //@ slab_of_part
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kBlockK / 16; ++i) wgmma_by_columns<T, false>(part, cols + i * 2, rows + i * 2, i > 0);
          wgmma_commit();
        };
        scales->fetch(g, row + row_of_group, col + col_of_group);
        add_up_steps<Of::kSumBuffers>(sums, ring, full, begin, end, start, release);
        cp_async_wait<0>();
        named_barrier_sync(2 + warpgroup, 128);  //@ scales_there
      } else {
        const auto start = [&](int stage, int step) {
          const uint64_t cols = columns_of(stage), rows = rows_of(stage);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kBlockK / 16; ++i)  // an offset of 32 bytes (TN) or 16 rows (NN)
#pragma unroll
            for (int w = 0; w < Of::kWide; ++w)
              wgmma_by_columns<T, !Of::kTN>(sums[w], cols + w * kOfSlab + i * (Of::kTN ? 2 : 128), rows + i * 2,  //@ of_slab
                                            step > begin || i > 0);
          wgmma_commit();
        };
        const int last = multiply_steps(ring, full, begin, end, start, [](int) {}, release);
        wgmma_finish(sums);
        release(last);
      }
      if (parts > 1) return;
#pragma unroll
      for (int w = 0; w < kWideOut; ++w) {
        // Nothing is stored then, so no barrier follows, and other warps may copy the next tile's scales over these.
        if (Of::kPromoted && col + col_of_group + w * 64 >= g.n) continue;
        const Finish finish = finish_of(w, col);
        if constexpr (Of::kTwo)
#pragma unroll
          for (int i = 0; i < Of::kHigh / 2; ++i) sums[w][i] = finish.combine(sums[2 * w][i], sums[2 * w + 1][i], i % 4 / 2);
        const auto box_of = [&](int down) -> const float(&)[Of::kAtOnce] {
          return reinterpret_cast<float(&)[Of::kAtOnce]>(sums[w][down / 2]);
        };
        const int top = row + row_of_group, left = col + col_of_group + w * 64;
        if constexpr (Of::kAnywhere) {
#pragma unroll
          for (int i = 0; i < Of::kDown; ++i) {
            const int down = min(i * kBoxRows, Of::kLast);
            store(box_of(down), finish, top, down, left);
          }
        } else if (left < g.n) {
#pragma unroll
          for (int first = 0; first < Of::kDown; first += Of::kBatch) {
            Out* boxes = next_batch();
            const int last = min(first + Of::kBatch, Of::kDown);
#pragma unroll
            for (int i = first; i < last; ++i) {
              const int down = min(i * kBoxRows, Of::kLast);
              write(boxes + (i - first) * kBox, box_of(down), finish, down);
            }
            batch_written();
            if (threadIdx.x % 128 > 0) continue;
#pragma unroll 1
            for (int i = first; i < last; ++i)
              if (const int down = top + min(i * kBoxRows, Of::kLast); down < g.m)
                tma_store(maps.c, boxes + (i - first) * kBox, left, down);
            tma_store_commit();
          }
        }
      }
    });
    if (parts > 1) {
      // Each thread puts its sums in the block's shared memory: piece 0 of all threads, then piece 1 and so on. Each block then
      // adds up some of the units.
      float4* partial = reinterpret_cast<float4*>(shared);
      constexpr int kPieces = Of::kHigh / 8;
      warps_sync<kWriters>();  // all stages are read  //@ all_read
#pragma unroll
      for (int w = 0; w < Of::kWide; ++w)
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          partial[(w * kPieces + i) * kWriters + threadIdx.x] = reinterpret_cast<float4*>(sums[w])[i];
      cluster_sync();  //@ partial_there
      for_tiles([&](int row, int col, bool) {
        for (int j = part; j < kWideOut * Of::kDown; j += parts) {
          const int w = j / Of::kDown, down = min(j % Of::kDown * kBoxRows, Of::kLast);
          const auto add_up = [&](float(&x)[Of::kAtOnce], int w) {
            for (int other = 0; other < parts; ++other) {
              const float4* theirs = at_block(partial, other * kSharing + rank - first) + (w * kPieces + down / 8) * kWriters + threadIdx.x;
#pragma unroll
              for (int i = 0; i < Of::kAtOnce / 4; ++i) {
                const float4 four = theirs[i * kWriters];
                x[4 * i] += four.x, x[4 * i + 1] += four.y, x[4 * i + 2] += four.z, x[4 * i + 3] += four.w;
              }
            }
          };
          float x[Of::kAtOnce] = {};
          add_up(x, Of::kTwo ? 2 * w : w);
          const Finish finish = finish_of(w, col);
          if constexpr (Of::kTwo) {
            float other[Of::kAtOnce] = {};
            add_up(other, 2 * w + 1);
#pragma unroll
            for (int i = 0; i < Of::kAtOnce; ++i) x[i] = finish.combine(x[i], other[i], i % 4 / 2);
          }
          store(x, finish, row + row_of_group, down, col + col_of_group + w * 64);
        }
      });
    }
    if (!Of::kAnywhere && threadIdx.x % 128 == 0) tma_store_wait<0>();
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers, or reads its sums
}

// Launches tiles of kM x kN. k may be divided into 2 or 4 parts, but not into more than it has steps. A cluster has one group
// for each part. With kAnywhere, `beside` must be true. A problem with a second B has it in `w2`.
template <int kM, int kN, Layout kLayout, bool kAnywhere = false, typename Finish = AsItIs, int kSharing = 2,
          typename Problem>
void launch_fitted(const Problem& g, int parts, bool beside) {
  using Of = Fitted<Problem, kLayout, kM, kN, kAnywhere, kSharing>;
  using T = typename Of::T;
  static_assert(kAnywhere || Of::kSplits);
  const auto kernel = multiply<Of, Finish>;
  allow_shared(kernel, Of::kBytes);
  Gemm<T> vectors = g;  // what has to start at multiples of 16 bytes
  vectors.k = 0;        // not checked: rows of A and B may have any length
  if (kAnywhere) vectors.n = 0, vectors.c = nullptr, vectors.ldc = 0;
  require_vectors<T, float>(vectors);
  STD_TORCH_CHECK(g.k > 0, "gemm: k must not be 0");
  STD_TORCH_CHECK(g.alpha == 1.0f && g.beta == 0.0f, "gemm: this kernel takes alpha 1 and beta 0, got ", g.alpha, " and ",
                  g.beta);
  FittedMaps maps;
  const Group group = group_of(kSharing, beside);
  const int of_a = group.across, of_b = group.down;  // pieces
  const auto map_a = [&](TensorMap& map, Inside rows) {
    return make_tensor_map(map, g.a, g.m, g.k, g.lda, rows.piece, kBlockK);
  };
  const auto map_b = [&](TensorMap& map, const T* b, int64_t ld, Inside cols) {
    return make_tensor_map(map, b, Of::kTN ? g.n : g.k, Of::kTN ? g.k : g.n, ld,
                           !Of::kTN ? kBlockK / of_b : Of::kTwo ? 64 : cols.piece, 64);
  };
  bool mapped = map_a(maps.a, Inside(kM, of_a)) && map_b(maps.b, g.b, g.ldb, Inside(kN, of_b));
  maps.a_last = maps.a, maps.b_other = maps.b;
  const Inside rows(g.m % kM, of_a), cols(g.n % kN, of_b);  // of the last tiles, 0 if these are as large as the others
  if (rows.size % kM != 0) mapped = mapped && map_a(maps.a_last, rows);
  if constexpr (Of::kTwo) mapped = mapped && map_b(maps.b_other, g.w2, g.ldw2, Inside(kN, of_b));
  else if (!Of::kSlabs && cols.size % kN != 0) mapped = mapped && map_b(maps.b_other, g.b, g.ldb, cols);
  STD_TORCH_CHECK(mapped && (kAnywhere || make_tensor_map(maps.c, output_of(g), g.m, g.n, g.ldc, kBoxRows, 64)),
                  "gemm: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer, and "
                  "leading dimensions under 2^39");
  const int64_t down = ceil_div(g.m, kM * group.down), across = ceil_div(g.n, Of::kColumns * group.across);
  STD_TORCH_CHECK(down * across <= INT_MAX / (2 * kSharing * 4), "gemm: more output tiles than fit 32 bits");
  int clusters = int(down * across);
  if (parts == 1) {
    int at_once = 0;
    STD_CUDA_CHECK(clusters_at_once(&at_once, kernel, kSharing, Of::kThreads, Of::kBytes));
    clusters = std::min(clusters, std::max(1, at_once));
  }
  const Division division{parts / 2, group, int(down), int(across)};  // parts are 1, 2 or 4
  const int blocks = kSharing * parts;
  STD_CUDA_CHECK(
      launch_clusters(kernel, blocks, clusters * blocks, Of::kThreads, Of::kBytes, g.stream, maps, g, division));
}

}  // namespace minfer
