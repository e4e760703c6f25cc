// v01_plain, v02_padded, v03_swizzled: the rounds of `banks`, with a tile of 32 x 32 words as it is, padded, or swizzled.
// Idea: shared memory has 32 banks, and a wavefront moves one word of each. Lanes that need different words of one bank
// take a wavefront each. At stride 32 all lanes are in one column of the tile, and a column is one bank. Padding moves each
// row of the tile a piece to the right, so that a column goes through all banks; the swizzle exchanges the pieces of row
// r by an exclusive or of their number with r, which does the same and takes no room.
// Expected: a load or store of 4 bytes a lane takes gcd(stride, 32) wavefronts in v01, and one in v02 and v03 for every
// power of two. Pieces of 8 and 16 bytes take at least 2 and 4, for they are 256 and 512 bytes. An SM makes one wavefront a
// cycle: 132 x 128 bytes x 1.755 GHz = 29.6 TB/s on an H200, divided by the conflicts.
#include "banks.h"

namespace minfer {

constexpr int kWarps = 8;                             // of a block
constexpr int kTile = 32 * (32 + 4);                  // words: with the padding of 16-byte pieces, for every layout

// Where the word at `row`, `column` of the tile lies.
enum class Layout { kPlain, kPadded, kSwizzled };

template <Layout kLayout, int kWords>
__device__ int place(int word) {
  const int row = word / 32, column = word % 32;
  if constexpr (kLayout == Layout::kPadded) return word + row * kWords;
  else if constexpr (kLayout == Layout::kSwizzled) return row * 32 + (column ^ row * kWords % 32);
  else return word;
}

template <Layout kLayout, typename Piece>
__global__ void __launch_bounds__(kWarps* kLanes) exchange(Exchange e) {
  constexpr int kWords = sizeof(Piece) / sizeof(float);
  __shared__ __align__(16) float tiles[kWarps][kTile];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, row = blockIdx.x * kWarps + warp;
  if (row >= e.rows) return;  // a whole warp: there is no barrier of the block
  Piece* mine = reinterpret_cast<Piece*>(&tiles[warp][place<kLayout, kWords>(lane * e.stride)]);
  Piece* next = reinterpret_cast<Piece*>(&tiles[warp][place<kLayout, kWords>((lane + kAcross) % kLanes * e.stride)]);

  const int64_t at = int64_t(row) * kLanes + lane;
  Piece piece = reinterpret_cast<const Piece*>(e.x)[at];
#pragma unroll 8
  for (int round = 0; round < e.rounds; ++round) {
    *mine = piece;
    __syncwarp();  //@ stored
    piece = *next;
    __syncwarp();
  }
  reinterpret_cast<Piece*>(e.y)[at] = piece;
}

template <Layout kLayout>
void launch(const Exchange& e) {
  const int blocks = (e.rows + kWarps - 1) / kWarps;
  if (e.words == 1) exchange<kLayout, float><<<blocks, kWarps * kLanes, 0, e.stream>>>(e);
  else if (e.words == 2) exchange<kLayout, float2><<<blocks, kWarps * kLanes, 0, e.stream>>>(e);
  else exchange<kLayout, float4><<<blocks, kWarps * kLanes, 0, e.stream>>>(e);
}

}  // namespace minfer

MINFER_BANKS(banks_v01_plain, minfer::launch<minfer::Layout::kPlain>)
MINFER_BANKS(banks_v02_padded, minfer::launch<minfer::Layout::kPadded>)
MINFER_BANKS(banks_v03_swizzled, minfer::launch<minfer::Layout::kSwizzled>)
