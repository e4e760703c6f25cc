// v03_ring: Hopper's copy engine brings the next rows to shared memory while a block sums and stores the present one.
// Idea: one thread orders a row with one instruction, as many rows ahead as shared memory holds, so that what is in
// flight depends neither on registers nor on who waits for whom. Blocks stay for all rows, each thread with its weights.
// Expected: v02's speed or better for many rows, of up to 64 KB; for few rows it is slower, because a row takes the way
// through shared memory. Measured: see README.md.
#include <algorithm>

#include "cuda/hopper.cuh"
#include "row.cuh"

namespace minfer {

constexpr int kMostThreads = 512, kMostStages = 16;
constexpr int kSharedPerSM = 226 << 10;  // of 228 KB, of which CUDA and the barriers take some

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads) ring(RmsNorm<T> p, int vectors, int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t full[kMostStages];
  __shared__ float partial[2][kMostThreads / 32];
  const int bytes = vectors * 16;
  const auto copy = [&](int row, int stage) {
    if (threadIdx.x != 0 || row >= p.tokens) return;
    barrier_expect(full + stage, bytes);
    bulk_load(shared + stage * bytes, p.x + row * p.x_stride, bytes, full + stage);
  };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) barrier_init(full + stage, 1);
    barrier_init_fence();
    for (int stage = 0; stage < stages; ++stage) copy(blockIdx.x + stage * gridDim.x, stage);
  }
  Vector<T> weight[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weight[i].bits = __ldg(reinterpret_cast<const uint4*>(p.weight) + at);
  }
  __syncthreads();

  int stage = 0, parity = 0, turn = 0;
  for (int row = blockIdx.x; row < p.tokens; row += gridDim.x, turn ^= 1) {
    const uint4* from = reinterpret_cast<const uint4*>(shared + stage * bytes);
    uint4* y = reinterpret_cast<uint4*>(p.y + row * p.y_stride);
    Vector<T> x[kVectors];
    float sum = 0.0f;
    barrier_wait(full + stage, parity);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      if (at < vectors) x[i].bits = from[at];
      sum += x[i].squares();
    }
    // Its barrier tells thread 0, too, that all have read the stage.
    const float scale = rsqrtf(sum_of_row(sum, partial[turn]) * p.share + p.eps);
    copy(row + stages * gridDim.x, stage);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      x[i].stay_packed(), weight[i].stay_packed();
      if (at < vectors) y[at] = x[i].scaled(scale, weight[i]).bits;
    }
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

template <int kVectors, typename T>
void launch_ring(const RmsNorm<T>& p, int vectors) {
  // Two warps or more: where a row has one alone, sum_of_row is no barrier.
  const int threads = std::max(64, (vectors + 32 * kVectors - 1) / (32 * kVectors) * 32), row = vectors * 16;
  // Blocks of an SM wait in turn: as many as have two stages each, for as many threads as hide the way to the sum.
  const int per_sm = std::clamp(kSharedPerSM / (2 * row + 1024), 1, std::max(1, 1024 / threads));
  const int stages = std::clamp((kSharedPerSM / per_sm - 1024) / row, 1, kMostStages);
  const int all = std::min(p.tokens, per_sm * multiprocessors());
  STD_CUDA_CHECK(cudaFuncSetAttribute(ring<T, kVectors>, cudaFuncAttributeMaxDynamicSharedMemorySize, stages * row));
  ring<T, kVectors><<<all, threads, stages * row, p.stream>>>(p, vectors, stages);
}

template <typename T>
void launch(const RmsNorm<T>& p) {
  require_vectors(p);
  const int vectors = p.hidden / Vector<T>::kCount;
  STD_TORCH_CHECK(vectors <= 8 * kMostThreads, "rmsnorm: this kernel takes rows of up to ", 8 * kMostThreads * 16,
                  " bytes, got ", vectors * int64_t{16});
  if (vectors <= 256)
    launch_ring<1>(p, vectors);
  else if (vectors <= 512)
    launch_ring<2>(p, vectors);
  else if (vectors <= 1024)
    launch_ring<4>(p, vectors);
  else
    launch_ring<8>(p, vectors);
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_v03_ring, minfer::launch)
