// v03_one_read: 16-byte loads and stores, and each row read once: up to 32768 elements of a half type (16384 of fp32) stay
// in registers, packed, longer rows in shared memory, as much of them as it holds.
// Idea: all loads of a row are under way before the first is waited for. A thread finds the maximum of its own elements and
// the sum relative to it, so that the block meets once; each power is computed a second time for the result, which costs a
// quarter of what an SM's special function units do in the time that memory takes.
// Expected: near the copy's speed for many rows of up to 16384. A row in shared memory has an SM to itself, which then does
// not load while it stores: half of it. Rows beyond 113,000 elements of a half type are read twice in part, and 64 rows
// leave half of the SMs idle.
// Measured (H100 80GB HBM3, bfloat16, none, rows=4096, n=128256): 2522 GB/s cold, 2510 steady; 171.3 % and 171.1 % of torch.
#include <algorithm>

#include "cuda/rows.cuh"
#include "online.cuh"

namespace minfer {

constexpr int kSharedThreads = 1024;

// 64 registers a thread: an SM has 64 KB of rows at once, as many as it takes to hide a round trip to memory.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostRowThreads, 2) in_registers(Softmax<T> p, int vectors) {
  __shared__ float2 partial[kMostRowThreads / 32];
  const int number = blockIdx.x * blockDim.y + threadIdx.y;
  const int valid = number < p.rows ? p.valid(number) : 0;
  Vector<T> x[kVectors];
  load_logits(x, p.x + number * p.x_stride, threadIdx.x, blockDim.x, valid, vectors);
  const Online row = reduce_row(online(x, p, threadIdx.x, blockDim.x), partial);
  write_row(p.y + number * p.y_stride, x, p, threadIdx.x, blockDim.x, number < p.rows ? vectors : 0, row);
}

// The first `kept` vectors of a row stay in shared memory, the rest is read from memory a second time.
template <typename T>
__global__ void __launch_bounds__(kSharedThreads) in_shared(Softmax<T> p, int vectors, int kept) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float2 partial[kSharedThreads / 32];
  constexpr int kCount = Vector<T>::kCount;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  uint4* y = reinterpret_cast<uint4*>(p.y + blockIdx.x * p.y_stride);
  uint4* row = reinterpret_cast<uint4*>(shared);
  const int valid = p.valid(blockIdx.x), used = (valid + kCount - 1) / kCount;

  Online mine;
  float logits[kCount];
#pragma unroll 4
  for (int at = threadIdx.x; at < used; at += kSharedThreads) {
    const Vector<T> piece = cut(Vector<T>(x[at]), valid - at * kCount);
    if (at < kept) row[at] = piece.bits;
    unpack_logits(logits, piece, p, at);
    mine.add(logits);
  }
  const Online whole = reduce_row(mine, partial);
  const float base = base_of(whole.max), scale = 1.0f / whole.sum;
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += kSharedThreads) {  // a thread reads what it wrote itself
    const Vector<T> piece(at >= used ? uint4{} : at < kept ? row[at] : x[at]);
    unpack_logits(logits, cut(piece, valid - at * kCount), p, at);
    y[at] = probabilities<T>(logits, base, scale).bits;
  }
}

template <typename T>
void launch(const Softmax<T>& p) {
  require_vectors(p);
  const int vectors = p.n / Vector<T>::kCount;
  const bool done = in_row_registers(p.rows, vectors, multiprocessors(), [&]<int kVectors>(int blocks, dim3 threads) {
    in_registers<T, kVectors><<<blocks, threads, 0, p.stream>>>(p, vectors);
  });
  if (done) return;
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int kept = std::min(vectors, (most - 1024) / 16);
  STD_CUDA_CHECK(cudaFuncSetAttribute(in_shared<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kept * 16));
  in_shared<T><<<p.rows, kSharedThreads, kept * 16, p.stream>>>(p, vectors, kept);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_v03_one_read, minfer::launch)
