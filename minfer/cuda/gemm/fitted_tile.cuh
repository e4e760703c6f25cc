// The tiles of fitted.cuh: their sizes, what they have in shared memory, and the copies of their operands.
#pragma once

#include <algorithm>
#include <utility>

#include "cuda/gemm/fitted_anywhere.cuh"
#include "cuda/gemm/tile_scales.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"

namespace minfer {

// The rows of A, or the columns of B, of a tile that are inside of the matrix, rounded up to a multiple of 8. Only they are
// copied, because TMA takes longer for a row outside of the matrix than for one inside. (In slabs, B is copied in whole slabs
// of 64 columns.) They are copied in `pieces` pieces, each of a multiple of 8 rows, so neighbouring pieces may overlap. Both
// copies then write the same numbers.
struct Inside {
  int size, pieces, piece;

  __host__ __device__ constexpr Inside(int count, int pieces)
      : size((count + 7) / 8 * 8), pieces(pieces), piece((size / pieces + 7) / 8 * 8) {}
  __host__ __device__ constexpr int begin(int number) const {
    const int last = size - piece;
    return number * piece < last ? number * piece : last;
  }
};

// Where a problem's product is stored.
template <typename Problem>
__host__ __device__ auto* output_of(const Problem& g) {
  if constexpr (requires { g.y; }) return g.y;
  else return g.c;
}

// Tiles of kM rows and kN columns of the product. One warpgroup multiplies tiles of 64 columns, three those of 192 columns and
// up to 192 rows (128 with promoted sums; with more, threads would have too few registers), and two all others. They divide the
// columns if each gets a multiple of 64, else the rows: a warpgroup has kWide times 64 columns, and kHigh rows. A group is the
// kSharing blocks that share operands. Two of them lie side by side or one below the other, four side by side or two by two.
// With kTwo the product has two Bs, and kN counts the columns of both: each 64 columns of the first B are followed by the same
// columns of the second, and the sums of both become one column of the product. With kAnywhere, rows of the product need not
// start at multiples of 16 bytes (fitted_anywhere.cuh); the tiles of a group are then side by side.
template <typename Problem_, Layout kLayout_, int kM_, int kN_, bool kAnywhere_ = false, int kSharing_ = 2>
struct Fitted {
  using Problem = Problem_;
  using T = std::remove_pointer_t<decltype(Problem::c)>;
  using Out = std::remove_pointer_t<decltype(output_of(std::declval<Problem>()))>;
  static constexpr Layout kLayout = kLayout_;
  static constexpr int kM = kM_, kN = kN_;
  static constexpr bool kAnywhere = kAnywhere_;
  static constexpr bool kTwo = requires { std::declval<Problem>().w2; };
  static constexpr bool kPromoted = std::is_same_v<T, E4M3Pair>;
  static constexpr int kSharing = kSharing_, kConsumers = kN == 64 ? 1 : kN == 192 && kM <= (kPromoted ? 128 : 192) ? 3 : 2;
  static constexpr int kWriters = kConsumers * 128, kThreads = kWriters + 128;
  static constexpr int kColumns = kTwo ? kN / 2 : kN;  // of the product
  static_assert(kSharing == 1 || kSharing == 2 || kSharing == 4);
  static_assert(!kTwo || (kN % 128 == 0 && !kAnywhere));
  static constexpr bool kTN = kLayout == Layout::TN, kSplitsColumns = kN % ((kTwo ? 128 : 64) * kConsumers) == 0;
  static constexpr int kWide = kN / 64 / (kSplitsColumns ? kConsumers : 1), kHigh = kM / (kSplitsColumns ? 1 : kConsumers);
  static_assert(kN % 64 == 0 && kHigh % 8 == 0 && kHigh >= kBoxRows && kM <= 256 && kN <= 256);

  // A stage in shared memory has 64 values of k, or 128 of fp8, of the columns of B and of the rows of A, in the 128-byte
  // swizzle. B is stored as [n][k] in TN, and in NN as slabs of 64 columns, [k][64] each. A is stored as [m][k].
  static constexpr int kB = kN * kBlockK, kElements = kB + kM * kBlockK, kStageBytes = kElements * sizeof(T);
  // A thread stores kAtOnce sums at once, which lie in the rows of a box. If kHigh is no multiple of these, the last two boxes
  // have rows in common.
  static constexpr int kAtOnce = kBoxRows / 2;
  static constexpr int kDown = (kHigh + kBoxRows - 1) / kBoxRows, kLast = kHigh - kBoxRows;
  // A warpgroup has buffers for two batches of boxes: it writes one while TMA still reads the other. It has one buffer if there
  // are three warpgroups, so that more stages fit. So has a lone block of 64 columns, whose buffer then has up to all boxes.
  static constexpr bool kLone = kN == 64 && kSharing == 1;
  using Scales = TileScales<kHigh, kWide * 64>;  // of a warpgroup
  static constexpr int kScaleBytes = kPromoted ? kConsumers * sizeof(Scales) : 0;
  static constexpr int kBuffers = kLone || kConsumers == 3 ? 1 : 2, kMost = (227 << 10) - kScaleBytes;
  static constexpr int kBoxBytes = kConsumers * kBuffers * kBox * sizeof(Out), kPerStage = kStageBytes + 2 * sizeof(uint64_t);
  static constexpr int kStages = std::min(kN == 64 ? 12 : 8, (kMost - kBoxBytes) / kPerStage);
  static constexpr int kFit = (kMost - kStages * kPerStage) / kBoxBytes;
  static constexpr int kBatch = kAnywhere ? 1 : std::min(kFit, kLone ? kDown : (kDown + 1) / 2);  // boxes
  static constexpr int kOut = kConsumers * kBuffers * kBatch * kBox;
  static constexpr int kBytes = kStages * kPerStage + kOut * sizeof(Out) + kScaleBytes;
  static_assert(!kAnywhere || kBuffers == 2);
  // With promoted sums: the registers that a thread has for its fp32 sums and the tensor cores' buffers, and how many buffers
  // fit. A buffer has the sums of 64 columns. (In tiles of 256 columns two would fit, and be slower.)
  static constexpr int kForSums = kConsumers == 1 ? 216 : kConsumers == 2 ? 200 : 120;
  static constexpr int kSumBuffers = kN < 256 && kHigh / 2 * (kWide + 2) <= kForSums ? 2 : 1;
  static constexpr bool kSplits = kM * kN * sizeof(float) <= kStages * kStageBytes;  // partial sums fit the stages' memory

  // These start the copies of one piece of B or of A. An operand has as many pieces as blocks share it, and each of these
  // blocks copies one to all of them. `load(box, x, y, second)` calls one of TMA's functions, and supplies the other arguments.
  // second: whether from the second B. In slabs of 64 columns, a piece of B has all columns and a part of the 64 values of k;
  // with two Bs in TN, it has some of the slabs.
  static constexpr bool kSlabs = !kTN || kTwo;
  template <int kPieces, typename Load>
  __device__ static void load_b(T* stage, int col, int k, Inside cols, int piece, Load load) {
    if constexpr (kSlabs) {
      constexpr int kAtOnce = kN / 64 / (kTN ? kPieces : 1), kSteps = kTN ? 0 : kBlockK / kPieces;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slab = kTN ? piece * kAtOnce + i : i, of = (kTwo ? slab / 2 : slab) * 64;
        T* box = stage + slab * kSlab + piece * kSteps * 64;
        const int x = k + piece * kSteps, y = col + of;
        if (of < cols.size) load(box, kTN ? x : y, kTN ? y : x, kTwo && slab % 2);
      }
    } else if (cols.size > 0) {
      load(stage + cols.begin(piece) * kBlockK, k, col + cols.begin(piece), false);
    }
  }
  __device__ static int bytes_of_b(Inside cols) {
    return sizeof(T) * (kSlabs ? (cols.size + 63) / 64 * (kTwo ? 2 : 1) * kSlab : cols.pieces * cols.piece * kBlockK);
  }
  template <typename Load>
  __device__ static void load_a(T* stage, int row, int k, Inside rows, int piece, Load load) {
    if (rows.size > 0) load(stage + kB + rows.begin(piece) * kBlockK, k, row + rows.begin(piece));
  }
};

}  // namespace minfer
