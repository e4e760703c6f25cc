// v22_any_size: small products whose rows do not start at multiples of 16 bytes. It takes any sizes, strides and addresses.
// Idea: with k = 300, v18_fitted first copies the operands in a launch of its own, which takes a large share of a small
// product's time. Here one launch reads rows where they are: cp.async copies words of two elements, if rows start at multiples
// of 4 bytes and have an even length. Else threads load single elements, and store them to shared memory. If all rows of A and
// B start at multiples of 16 bytes, both are copied as in v07. Blocks share k as in v08. Tiles are 64 x 64.
// Expected: the time of v08 at small sizes, and slower than v18_fitted at large ones, where small tiles read too much.
#include "hgemm.h"
#include "split_k.cuh"

namespace minfer {

// Copies an operand tile by tile, as TileCopy, but in words of two elements. Elements outside of the matrix are not read; the
// tile has zeros there.
template <typename Place, bool kDown, int kRows, int kCols, int kThreads, typename T>
struct WordCopy {
  static constexpr int kWords = kCols / 2, kRowStep = kThreads / kWords, kEach = kRows / kRowStep;
  static_assert(kThreads % kWords == 0 && kRows % kRowStep == 0);

  const T* source;           // this thread's first word of the next tile
  int64_t row_step;          // elements from there to its next word
  int rows_left, cols_left;  // from there to the end of the matrix
  bool by_words;

  // The first tile starts at (row0, col0) of a rows x cols matrix.
  __device__ WordCopy(const T* matrix, int64_t ld, int row0, int col0, int rows, int cols) {
    by_words = reinterpret_cast<uintptr_t>(matrix) % 4 == 0 && ld % 2 == 0 && cols % 2 == 0;  //@ by_words
    source = matrix + (row0 + row()) * ld + col0 + col();
    row_step = kRowStep * ld;
    rows_left = rows - row0 - row(), cols_left = cols - col0 - col();
  }
  __device__ static int row() { return threadIdx.x / kWords; }
  __device__ static int col() { return threadIdx.x % kWords * 2; }

  __device__ void start(T* tile) {
    const auto place = [&](int i) { return tile + Place::at(row() + i * kRowStep, col()); };
    const auto inside = [&](int i) { return i * kRowStep < rows_left && cols_left > 0; };  //@ inside
    if (by_words) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) cp_async_few<4>(place(i), source + i * row_step, inside(i));
    } else {
      uint32_t words[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const auto* two = reinterpret_cast<const uint16_t*>(source + i * row_step);
        words[i] = inside(i) ? two[0] : 0;
        if (inside(i) && cols_left > 1) words[i] |= uint32_t(two[1]) << 16;  //@ second
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) *reinterpret_cast<uint32_t*>(place(i)) = words[i];
    }
    source += kDown ? kRows / kRowStep * row_step : kCols;
    (kDown ? rows_left : cols_left) -= kDown ? kRows : kCols;
  }
};

// A warp's tile whose rows may start and end anywhere in the product.
template <typename T, Layout kLayout>
struct WarpAnywhere : WarpTile<T, float, kLayout, 32, 32> {
  __device__ void store(const Gemm<T>& g, int row0, int col0) const {
    const int row = row0 + threadIdx.x % 32 / 4, col = col0 + threadIdx.x % 4 * 2;
    const bool by_pairs = reinterpret_cast<uintptr_t>(g.c) % 4 == 0 && g.ldc % 2 == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // every eighth row
      const int at = row + i * 8;
      if (at >= g.m) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        T* c = g.c + at * g.ldc + col + j * 8;
        const int left = g.n - col - j * 8;
        float x = g.alpha * this->sums[i / 2][j][i % 2 * 2], y = g.alpha * this->sums[i / 2][j][i % 2 * 2 + 1];
        if (g.beta != 0.0f) {
          if (left > 0) x += g.beta * float(c[0]);
          if (left > 1) y += g.beta * float(c[1]);
        }
        if (left > 1 && by_pairs) {
          *reinterpret_cast<typename WarpAnywhere::Pair*>(c) = {T(x), T(y)};
        } else {
          if (left > 0) c[0] = T(x);
          if (left > 1) c[1] = T(y);  //@ last_column
        }
      }
    }
  }
};

template <typename T, Layout kLayout, template <typename, bool, int, int, int, typename> typename Copy>
struct Tile : BlockTile<T, float, kLayout, 64, 64, 64, 3, 32, 32, Copy> {
  using Warp = WarpAnywhere<T, kLayout>;
  static constexpr int kBlocksPerSM = 2;
};

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  // With n parts, the last block takes about 0.15 n us to add them up, and each part 0.25 us for each of its k_tiles / n steps
  // (estimates). The sum of both is least at n = sqrt(0.25 / 0.15 k_tiles).
  const auto most_splits = [](int k_tiles) { return int(1.3 * std::sqrt(k_tiles)); };
  const auto by_pieces = [](const T* matrix, int64_t ld) {
    return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && ld % 8 == 0;
  };
  const bool whole_pieces = g.k % 8 == 0 && (kLayout == Layout::TN || g.n % 8 == 0);
  if (whole_pieces && by_pieces(g.a, g.lda) && by_pieces(g.b, g.ldb))
    launch_split_k<Tile<T, kLayout, TileCopy>, kLayout>(g, most_splits);
  else
    launch_split_k<Tile<T, kLayout, WordCopy>, kLayout>(g, most_splits);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v22_any_size, minfer::launch)
