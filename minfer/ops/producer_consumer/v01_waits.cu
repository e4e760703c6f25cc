// v01_waits: every thread loads its pieces of a tile, waits for them, computes, and stores them.
// Idea: what one writes first. A tile's loads begin when the tile before it is done.
// Expected: an SM with 2 blocks has 4096 elements at a time. Their 64 steps are 4096 x 64 / 128 = 2048 cycles, 1.2 us, and the
// way from memory is about 0.6 us, during which one block computes only if the other happens to wait: between 1.2 and 1.8 us
// for 4096 elements, where memory alone would take 1.0 us. With 8 steps the way is most of it.
// Measured (H200, float32, n=67108864): 2474 GB/s cold; 177.9 % of torch.
#include "tile.cuh"

namespace minfer {

__global__ void __launch_bounds__(kThreads, kBlocksPerSM) waits(Stream s) {
  const int tiles = tiles_of_block(s.n);
#pragma unroll 1
  for (int number = 0; number < tiles; ++number) {
    float4 pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (const int64_t at = place_of(number, i, threadIdx.x); at < s.n)
        pieces[i] = *reinterpret_cast<const float4*>(s.x + at);
      else
        pieces[i] = make_float4(0, 0, 0, 0);
    compute(pieces, s.steps);
    store(s, pieces, number);
  }
}

void launch(const Stream& s) { launch_blocks(s, waits, kThreads); }

}  // namespace minfer

MINFER_STREAM(producer_consumer_v01_waits, minfer::launch)
