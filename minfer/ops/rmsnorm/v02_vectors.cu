// v02_vectors: 16-byte loads and stores, and one pass: a thread keeps its pieces of the row from the sum to the product.
// Idea: all loads of a row, and of its weights, are under way before the first is waited for, and blocks are small, so that
// an SM holds several rows: one is summed while others load or store. No cache hints: evict-first loads (`__ldcs`) cost 5
// %.
// Expected: near the copy's speed for many rows. For few, latency: one round trip of loads, one barrier, one of stores.
// Persistent blocks that prefetch their next row take 5 % longer at 16384 rows, a ring of TMA copies 11 %.
// Measured (H200, bfloat16, tokens=655360, hidden=128): 3139 GB/s cold; 376.4 % of torch.
#include <algorithm>

#include "cuda/norm_row.cuh"
#include "rmsnorm.h"

namespace minfer {

// Threads of a row that is kept in registers: kThreads where there are many rows, kMostThreads where there are few.
constexpr int kThreads = 256, kMostThreads = 512;
constexpr int kMostSharedThreads = 1024;  // of one that is kept in shared memory

// A thread's pieces of a row: every blockDim.x-th of its `vectors`, so that a warp's are side by side; zero beyond.
template <typename T, int kVectors>
__device__ void load_row(Vector<T> (&to)[kVectors], const T* row, int vectors) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    to[i].bits = at < vectors ? reinterpret_cast<const uint4*>(row)[at] : uint4{};
  }
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads) in_registers(RmsNorm<T> p, int vectors) {
  __shared__ float partial[kMostThreads / 32];
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  Vector<T> x[kVectors], weight[kVectors];
  load_row(x, p.x + row * p.x_stride, row < p.tokens ? vectors : 0);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weight[i].bits = reinterpret_cast<const uint4*>(p.weight)[at];
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += squares(x[i]);
  const float scale = rsqrtf(reduce_row(sum, partial) * p.share + p.eps);  //@ eps
  uint4* y = reinterpret_cast<uint4*>(p.y + row * p.y_stride);  //@ y_row
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i].stay_packed(), weight[i].stay_packed();
    if (at < vectors && row < p.tokens) y[at] = scaled(x[i], scale, weight[i]).bits;
  }
}

// Rows too long for registers: the first `kept` vectors stay in shared memory, the rest is read from memory a second time.
template <typename T>
__global__ void __launch_bounds__(kMostSharedThreads) in_shared(RmsNorm<T> p, int vectors, int kept) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float partial[kMostSharedThreads / 32];
  const uint4* x = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  const uint4* weight = reinterpret_cast<const uint4*>(p.weight);
  uint4* y = reinterpret_cast<uint4*>(p.y + blockIdx.x * p.y_stride);
  uint4* row = reinterpret_cast<uint4*>(shared);

  float sum = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += blockDim.x) {
    const Vector<T> piece(x[at]);
    sum += squares(piece);
    if (at < kept) row[at] = piece.bits;
  }
  const float scale = rsqrtf(reduce_row(sum, partial) * p.share + p.eps);  //@ eps_long
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += blockDim.x)  // a thread reads what it wrote itself
    y[at] = scaled(Vector<T>(at < kept ? row[at] : x[at]), scale, Vector<T>(weight[at])).bits;
}

template <int kVectors, typename T>
void launch_in_registers(const RmsNorm<T>& p, int vectors) {
  const int threads = (vectors + 32 * kVectors - 1) / (32 * kVectors) * 32;  // of a row
  const int rows = std::max(1, 128 / threads);                               // of a block
  in_registers<T, kVectors><<<(p.tokens + rows - 1) / rows, dim3(threads, rows), 0, p.stream>>>(p, vectors);
}

template <typename T>
void launch_in_shared(const RmsNorm<T>& p, int vectors) {
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int kept = std::min(vectors, (most - 1024) / 16);
  STD_CUDA_CHECK(cudaFuncSetAttribute(in_shared<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kept * 16));
  in_shared<T><<<p.tokens, kMostSharedThreads, kept * 16, p.stream>>>(p, vectors, kept);
}

template <typename T>
void launch(const RmsNorm<T>& p) {
  require_vectors(p);
  const int vectors = p.hidden / Vector<T>::kCount;
  // With few rows no SM has enough to do, and a thread should have as little as possible.
  const int threads = p.tokens <= 2 * multiprocessors() ? kMostThreads : kThreads;
  if (vectors <= threads)
    launch_in_registers<1>(p, vectors);
  else if (vectors <= 2 * threads)
    launch_in_registers<2>(p, vectors);
  else if (vectors <= 4 * threads)
    launch_in_registers<4>(p, vectors);
  else if (vectors <= 8 * kMostThreads)
    launch_in_registers<8>(p, vectors);
  else
    launch_in_shared(p, vectors);
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_v02_vectors, minfer::launch)
