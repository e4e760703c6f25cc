// v20_any_columns: B in NN with any number of columns and at any address, such as a head of 49155 or 50257 words; few rows of A.
// Idea: where 8 does not divide n, neither TMA nor 16-byte loads can start at the beginning of each row. But rows k and k + 8
// start at the same offset within 16 bytes, whatever n is. So each of a block's 8 warps takes every eighth row and loads aligned pieces of 16
// bytes. A lane keeps the sums of the columns that it has loaded. Only the sums, in shared memory, are shifted to their columns.
// As in v15, mma.sync multiplies, with B^T on its 16-row side: the order of k is free, so k may go in steps of 8.
// Expected (H100): B at 85 % of the speed of memory, 49155 x 4096 in 160 us. A copy to padded rows takes three times the bytes.
#include "cuda/counters.cuh"
#include "cuda/gemm/warp_tile.cuh"
#include "cuda/load_if.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kClasses = 8;                   // of rows of B, by k % 8; one for each warp
constexpr int kOfBlock = 32 * kClasses;       // threads
constexpr int kRead = 128;                    // columns that a block reads
constexpr int kStripe = kRead - 8;            // columns that a block computes, as pieces may start before the first of them
constexpr int kResident = 2;                  // blocks that run on an SM at once
constexpr int kSumsOfRow = kRead + 1;         // in shared memory
constexpr int kMostRows = 64;                 // of A; the others would make L2 the limit
constexpr int kFixed = 128;                   // what a block costs beside its rows of B, in rows of B

constexpr int quotient_up(int a, int b) { return (a + b - 1) / b; }

// A block computes kRows rows.
template <typename T, int kRows>
struct Portion {
  static constexpr int kUnrolled = 1, kStep = 16 * kUnrolled;  // rows of a class that a warp loads at once; with 32 registers spill
  static constexpr int kMostK = 16384 / kRows;                                  // of A in shared memory
  // Distances in shared memory of the classes and rows of A. With them, neither its writing nor its reading has bank conflicts.
  static constexpr int kOfClass = kMostK / kClasses + 4, kOfRow = kClasses * kOfClass + 48;
  static constexpr int kBytesOfA = kRows * kOfRow * sizeof(T), kBytesOfSums = kClasses * 8 * kSumsOfRow * sizeof(float);
  static constexpr int kBytes = kBytesOfA > kBytesOfSums ? kBytesOfA : kBytesOfSums;
};

// Brings A from k = from to `to` to shared memory, row by row, class by class; zeros behind it up to `until`.
template <typename T, int kRows>
__device__ void stage_a(T* shared, const T* a, int64_t lda, int rows, int from, int to, int until) {
  using Of = Portion<T, kRows>;
  const int pieces = (until - from) / 8;
  const bool aligned = reinterpret_cast<uintptr_t>(a) % 16 == 0 && lda % 8 == 0;
  for (int i = threadIdx.x; i < rows * pieces; i += kOfBlock) {
    const int row = i / pieces, piece = i % pieces, k = from + 8 * piece;
    const T* source = a + row * lda + k;
    T* target = shared + row * Of::kOfRow + piece;
    if (aligned && k + 8 <= to) {
      const uint4 values = *reinterpret_cast<const uint4*>(source);
#pragma unroll
      for (int j = 0; j < 8; ++j) target[j * Of::kOfClass] = reinterpret_cast<const T*>(&values)[j];
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) target[j * Of::kOfClass] = k + j < to ? source[j] : T(0.0f);  //@ zeros_of_a
    }
  }
}

// The place of an element within 16 bytes, in elements.
template <typename T>
__device__ int place_in_piece(const T* element) {
  return int(reinterpret_cast<uintptr_t>(element) / sizeof(T) % 8);
}

// Whether the piece of an element of B begins before B, or ends behind it. These pieces are not loaded.
template <typename T>
__device__ bool crosses_an_edge(const Gemm<T>& g, const T* element) {
  const T* piece = element - place_in_piece(element);
  return piece < g.b || piece + 8 > g.b + (g.k - 1) * g.ldb + g.n;
}

// The products of the elements of B that no piece has brought. Only rows of B at either end have some.
template <typename T>
__device__ float products_at_edges(const Gemm<T>& g, int row, int col, int from, int to) {
  const int most = g.ldb >= 8 ? 1 : 8;
  float sum = 0.0f;
  const auto add = [&](int k) {
    const T* b = g.b + k * g.ldb + col;
    if (k >= from && k < to && crosses_an_edge(g, b)) sum += float(g.a[row * g.lda + k]) * float(*b);
  };
  for (int k = 0; k < min(most, g.k); ++k) add(k);
  for (int k = max(most, g.k - most); k < g.k; ++k) add(k);  //@ last_rows
  return sum;
}

template <typename T>
__device__ void store(const Gemm<T>& g, int row, int col, float sum) {
  T* c = g.c + row * g.ldc + col;
  *c = T(g.alpha * sum + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
}

// Block (x, y): kRows rows and kStripe columns, and of k the part y.
template <typename T, int kRows>
__global__ void __launch_bounds__(kOfBlock, kResident)
    multiply_any_columns(Gemm<T> g, int groups, int k_each, float* parts, unsigned* counters) {
  using Of = Portion<T, kRows>;
  constexpr int kHalves = kRows / 8, kUnrolled = Of::kUnrolled;
  __shared__ uint4 shared[Of::kBytes / 16 + 1];
  __shared__ int shifts[kClasses];
  __shared__ bool last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  const int tile = blockIdx.x, row0 = tile % groups * kRows, col0 = tile / groups * kStripe;
  const int rows = min(kRows, g.m - row0), cols = min(kStripe, g.n - col0);
  const int from = blockIdx.y * k_each, to = min(g.k, from + k_each);
  T* a = reinterpret_cast<T*>(shared);
  const T* first = g.b + (from + warp) * g.ldb + col0;
  const int shift = place_in_piece(first);
  const T* begin = g.b;
  const T* end = g.b + (g.k - 1) * g.ldb + g.n;
  const T* pieces = first - shift + lane / 4 * 8;
  const bool wanted[2] = {lane / 4 * 8 - shift < cols, 64 + lane / 4 * 8 - shift < cols};
  if (lane == 0) shifts[warp] = shift;

  float sums[kHalves][2][4][4] = {};
  for (int chunk = from; chunk < to; chunk += Of::kMostK) {
    const int until = min(to, chunk + Of::kMostK), steps = (until - chunk + 8 * Of::kStep - 1) / (8 * Of::kStep);
    if (chunk > from) __syncthreads();
    stage_a<T, kRows>(a, g.a + row0 * g.lda, g.lda, rows, chunk, until, chunk + steps * 8 * Of::kStep);
    __syncthreads();  //@ a_there
    for (int step = 0; step < steps; ++step) {
      uint32_t b[kUnrolled][2][4][4];  // [step][window of 64 columns][row of the class][two columns]
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int down = chunk - from + 8 * (step * Of::kStep + 16 * u + 4 * quad + i);
          const T* row = pieces + down * g.ldb;
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const T* piece = row + 64 * w;
            const bool inside = piece >= begin && piece + 8 <= end;  //@ inside
            uint4 bits{};
            load_if(bits, reinterpret_cast<const uint4*>(piece), wanted[w] && inside && from + warp + down < until);
            b[u][w][i][0] = bits.x, b[u][w][i][1] = bits.y, b[u][w][i][2] = bits.z, b[u][w][i][3] = bits.w;
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int row = 8 * half + lane / 4;
          const T* at = a + row * Of::kOfRow + warp * Of::kOfClass + step * Of::kStep + 16 * u + 4 * quad;
          const uint2 of_a = row < rows ? *reinterpret_cast<const uint2*>(at) : uint2{};
#pragma unroll
          for (int w = 0; w < 2; ++w)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const auto low = [&](int i) { return __byte_perm(b[u][w][i][j], b[u][w][i + 1][j], 0x5410); };
              const auto high = [&](int i) { return __byte_perm(b[u][w][i][j], b[u][w][i + 1][j], 0x7632); };
              mma_m16n8k16<T>(sums[half][w][j], {low(0), high(0), low(2), high(2)}, {of_a.x, of_a.y});
            }
        }
      }
    }
  }

  const int splits = gridDim.y;
  const auto part = [&](int split) { return parts + (int64_t(tile) * splits + split) * kRows * kStripe; };
  float* of_warps = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    __syncthreads();  //@ shared_is_free
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          of_warps[(warp * 8 + 2 * quad + i % 2) * kSumsOfRow + 64 * w + lane / 4 * 8 + 2 * j + i / 2] = sums[half][w][j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < min(8, rows - 8 * half) * kStripe; i += kOfBlock) {
      const int row = i / kStripe, col = i % kStripe;
      if (col >= cols) continue;
      float sum = products_at_edges(g, row0 + 8 * half + row, col0 + col, from, to);
      for (int k = 0; k < kClasses; ++k) sum += of_warps[(k * 8 + row) * kSumsOfRow + col + shifts[k]];  //@ shifted
      if (splits > 1) part(blockIdx.y)[(8 * half + row) * kStripe + col] = sum;
      else store(g, row0 + 8 * half + row, col0 + col, sum);
    }
  }
  if (splits == 1) return;

  // The block that arrives last adds up the parts, always in the order of k.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(counters + tile, splits - 1) == splits - 1;  //@ last_part
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < rows * kStripe; i += kOfBlock) {
    if (i % kStripe >= cols) continue;
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += __ldcg(part(split) + i);
    store(g, row0 + i / kStripe, col0 + i % kStripe, sum);
  }
}

// Divides k into the number of parts that has the least waves x (rows of B of a block + its fixed cost).
template <int kRows, typename T>
void launch_rows(const Gemm<T>& g) {
  constexpr int kBatch = 8 * Portion<T, kRows>::kStep, kMostParts = 32;
  const int groups = quotient_up(g.m, kRows);
  const int64_t tiles = int64_t(groups) * quotient_up(g.n, kStripe), at_once = kResident * multiprocessors();
  STD_TORCH_CHECK(tiles <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  int k_each = std::max(1, quotient_up(g.k, kBatch)) * kBatch;
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= (tiles > kMostCounters ? 1 : kMostParts); ++parts) {
    const int each = std::max(1, quotient_up(quotient_up(g.k, parts), kBatch)) * kBatch;
    const int64_t waves = (tiles * std::max(1, quotient_up(g.k, each)) + at_once - 1) / at_once;
    if (const int64_t cost = waves * (each + kFixed); cost < least) least = cost, k_each = each;
  }
  const int splits = std::max(1, quotient_up(g.k, k_each));
  const auto parts = scratch_words(splits > 1 ? tiles * splits * kRows * kStripe : 0);
  multiply_any_columns<T, kRows><<<dim3(tiles, splits), kOfBlock, 0, g.stream>>>(
      g, groups, k_each, static_cast<float*>(parts.mutable_data_ptr()),
      splits > 1 ? counters_of(g.stream) : nullptr);
}

template <typename T>
void launch(const Gemm<T>& g) {
  STD_TORCH_CHECK(g.m <= kMostRows, "hgemm: this kernel takes m up to ", kMostRows, ", got ", g.m);
  STD_TORCH_CHECK(g.layout == Layout::NN || g.n == 1 || g.k == 1, "hgemm: this kernel takes b stored as (K, N)");
  g.m <= 8 ? launch_rows<8>(g) : launch_rows<16>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v20_any_columns, minfer::launch)
