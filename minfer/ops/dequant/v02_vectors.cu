// v02_vectors: 16-byte loads to shared memory for blocks of any size, and 16-byte stores.
// Idea: blocks of a matrix are contiguous, and 2048 weights of any format are a multiple of 16 bytes. So a thread block copies
// 2048 weights with cp.async, unchanged; each thread then reads the bytes of its weights from shared memory, where a byte costs
// no more than a word. Four such pieces are in flight before the first is decoded: 4 to 9 KB a block, 32 to 70 KB an SM.
// Expected: near the memory's speed, because a thread stores 16 bytes of y at a time. 28672 x 4096 from int4 in
// groups of 128 to bfloat16 reads 62 MB and writes 235 MB: 69 us at 4.28 TB/s. Decoding takes up to three instructions a
// weight, 40 us on an H200, and overlaps with the copies.
// Measured (H200, bfloat16, q8_0, n=28672, k=4096): 3949 GB/s cold; 1218 % of torch.
#include "dequant.h"
#include "cuda/mma.cuh"
#include "cuda/vector.cuh"

namespace minfer {

constexpr int kThreads = 256, kPiece = 8 * kThreads, kPieces = 4;

template <typename F, typename T, typename S>
__global__ void __launch_bounds__(kThreads) vectors(T* y, Weights<S> weights, int64_t count) {
  constexpr int kBytes = kPiece / F::kBlock * F::kBytes;  // of a piece
  static_assert(kPiece % F::kBlock == 0 && kBytes % 16 == 0);
  __shared__ __align__(16) uint8_t tile[kPieces * kBytes];
  const int64_t first = int64_t(blockIdx.x) * (kPieces * kPiece);
  const uint8_t* from = weights.w + first / F::kBlock * F::kBytes;
  const int64_t bytes = (count - first) / F::kBlock * F::kBytes;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    for (int at = piece * kBytes + threadIdx.x * 16; at < (piece + 1) * kBytes; at += kThreads * 16) {
      if (at + 16 <= bytes) cp_async_16(tile + at, from + at);
      else
        for (int i = at; i < bytes; ++i) tile[i] = from[i];  // the last bytes of the matrix
    }
    cp_async_commit();
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece == 0) cp_async_wait<3>();
    if (piece == 1) cp_async_wait<2>();
    if (piece == 2) cp_async_wait<1>();
    if (piece == 3) cp_async_wait<0>();
    __syncthreads();  //@ copied
    const int inside = piece * kPiece + threadIdx.x * 8;
    const int64_t at = first + inside;
    if (at >= count) continue;
    const int64_t scale = kIsFp8<F> ? at / weights.k : kIsInt4<F> ? at / F::kBlock : 0;
    float values[8];
    F::decode(tile + inside / F::kBlock * F::kBytes, inside % F::kBlock, weights.scales + scale,
              weights.zeros + (kIsInt4<F> ? scale : 0), values);
    constexpr int kCount = Vector<T>::kCount;
#pragma unroll
    for (int i = 0; i < 8; i += kCount) {
      float some[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) some[j] = values[i + j];
      __stcs(reinterpret_cast<uint4*>(y + at + i), Vector<T>(some).bits);
    }
  }
}

template <typename F, typename T, typename S>
void launch(T* y, const Weights<S>& weights, cudaStream_t stream) {
  const int64_t count = weights.n * weights.k, blocks = (count + kPieces * kPiece - 1) / (kPieces * kPiece);
  STD_TORCH_CHECK(blocks <= INT_MAX, "dequant: y has more elements than a launch has blocks for");
  check_pieces(weights.w, 16, 16, "dequant: w");
  check_pieces(y, 8, 8, "dequant: y");
  vectors<F, T, S><<<dim3(blocks), kThreads, 0, stream>>>(y, weights, count);
}

}  // namespace minfer

MINFER_DEQUANT(dequant_v02_vectors)
