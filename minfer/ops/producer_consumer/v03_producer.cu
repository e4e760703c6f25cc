// v03_producer: a warp of its own copies the tiles, and eight warps compute them; they meet at named barriers.
// Idea: two buffers, and of each two barriers, "full" and "empty". The producer waits at "empty", copies, and arrives at
// "full" without waiting; consumers wait at "full", compute, and arrive at "empty". Neither stops the other unless it is two
// tiles ahead: __syncthreads() could not do this, for everybody waits at it.
// Expected: no faster than v02_every_warp, whose copies need nobody's consent. The producer issues 16 copies a lane and tile
// and two barriers, a few hundred cycles of one warp in the 2048 of a tile; the consumers wait at a barrier for what v02 has
// waited for alone. It pays where consumers have no registers or issue slots to spare, or where one thread can copy a
// whole tile, as TMA does (hgemm's v11_specialised).
// Measured (H200, float32, n=67108864): 2629 GB/s cold; 189.0 % of torch.
#include "cuda/mma.cuh"
#include "cuda/named_barrier.cuh"
#include "tile.cuh"

namespace minfer {

constexpr int kAll = kThreads + 32;  // the producer is the last warp
constexpr int kFull = 1, kEmpty = 3;  // the barriers of the first buffer; the second's are the next

__global__ void __launch_bounds__(kAll, kBlocksPerSM) producer(Stream s) {
  __shared__ __align__(16) float4 buffers[2][kPieces][kThreads];
  const int tiles = tiles_of_block(s.n), lane = threadIdx.x % 32;

  if (threadIdx.x >= kThreads) {
    for (int number = 0; number < tiles; ++number) {
      if (number >= 2) named_barrier_sync(kEmpty + number % 2, kAll);  //@ wait_empty
      for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int thread = lane; thread < kThreads; thread += 32) {
          const int64_t at = place_of(number, i, thread);
          cp_async_16(&buffers[number % 2][i][thread], s.x + (at < s.n ? at : 0), at < s.n);
        }
      cp_async_commit();
      if (number == 0) continue;
      cp_async_wait<1>();  // the tile before this one has come
      named_barrier_arrive(kFull + (number - 1) % 2, kAll);
    }
    cp_async_wait<0>();
    named_barrier_arrive(kFull + (tiles - 1) % 2, kAll);
    return;
  }

#pragma unroll 1
  for (int number = 0; number < tiles; ++number) {
    named_barrier_sync(kFull + number % 2, kAll);
    float4 pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = buffers[number % 2][i][threadIdx.x];
    compute(pieces, s.steps);
    if (number + 2 < tiles) named_barrier_arrive(kEmpty + number % 2, kAll);  //@ say_empty
    store(s, pieces, number);
  }
}

void launch(const Stream& s) { launch_blocks(s, producer, kAll); }

}  // namespace minfer

MINFER_STREAM(producer_consumer_v03_producer, minfer::launch)
