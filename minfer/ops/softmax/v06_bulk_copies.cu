// v06_bulk_copies: up to 8 blocks of a cluster share a row, which TMA copies to shared memory.
// Idea: v05_cluster keeps a row in registers, 64 a thread. TMA's copies to shared memory take neither registers nor
// instructions, so an SM has more parts of rows at once, and sums the first chunks of a part while later ones arrive. A logit
// takes two instructions less in all: the difference from the maximum and the product with log2 e are one multiply-add
// (exponentials.cuh), and the sum is scaled once for two vectors. Blocks send each other their maxima and sums with st.async
// and need no barrier of the cluster for that. Rows may start and end anywhere: whole vectors are copied from the first
// multiple of 16 bytes on, and the few elements at either end are read and written one by one.
// Expected: 0.95 of the copy's speed at (4096, 128256) in bfloat16. For few rows the speed of v05_cluster, because then all
// rows are loaded, summed and written at the same time.
// Measured (H100 80GB HBM3, bfloat16, none, rows=4096, n=128256): 2990 GB/s cold, 2986 steady; 203.1 % and 203.5 % of torch.
#include <algorithm>

#include "cuda/cluster_mail.cuh"
#include "exponentials.cuh"

namespace minfer {

constexpr int kMostCluster = 8;  // what every GPU of sm_90 grants
constexpr int kThreads = 256, kMostThreads = 512;
constexpr int kMostShared = 226 << 10;  // of 227 KB; the rest is for the static shared memory below
constexpr int kChunk = 1024, kMostChunks = 15;  // vectors of a chunk, which has a barrier; chunks of a block
constexpr int kShare = 3072;                    // vectors of a block at most, unless the cluster has kMostCluster blocks

// A block's part of a row. With kAny the row may have a mask, and may start and end anywhere.
template <typename T, bool kAny>
struct Part {
  static constexpr int kCount = Vector<T>::kCount;
  const Softmax<T>& p;
  const T* x;
  int head, first, mine;  // elements before the first vector; the first vector of the part; its vectors
  int valid;              // elements of the row that count

  __device__ Part(const Softmax<T>& p, int row, int share, int rank)
      : p(p), x(p.x + row * p.x_stride), head(0), first(rank * share) {
    if (kAny) head = min(int(-reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T)), p.n);
    mine = min(max((p.n - head) / kCount - first, 0), share);
    valid = kAny ? p.valid(row) : p.n;
  }

  // How many of the part's vectors have elements that count.
  __device__ int used() const {
    return kAny ? min(max((valid - head + kCount - 1) / kCount - first, 0), mine) : mine;
  }

  __device__ const uint4* vectors() const { return reinterpret_cast<const uint4*>(x + head) + first; }

  // The logits of vector `at` of the part. It is in shared memory if any of its elements count.
  __device__ void unpack(float* to, const uint4* shared, int at) const {
    float(&logits)[kCount] = reinterpret_cast<float(&)[kCount]>(*to);
    if constexpr (!kAny) {
      Vector<T>(shared[at]).unpack(logits);
    } else {
      const int begin = head + (first + at) * kCount;  // element of the row
      Vector<T> piece(begin < valid ? shared[at] : uint4{});
      if (valid - begin < kCount) piece = cut(piece, valid - begin);
      if (head == 0) return unpack_logits(logits, piece, p, first + at);
      piece.unpack(logits);
      if (!p.bias) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) logits[i] += float(p.bias[begin + i]);
    }
  }

  // The elements before the row's first vector and behind its last: how many, the index of each, and the logit at an index.
  __device__ int edges() const { return head + (p.n - head) % kCount; }
  __device__ int edge(int i) const { return i < head ? i : p.n - edges() + i; }
  __device__ float logit(int at) const {
    return at >= valid ? -INFINITY : p.bias ? float(x[at]) + float(p.bias[at]) : float(x[at]);
  }
};

template <typename T, bool kAny>
__global__ void __launch_bounds__(kMostThreads, 2) bulk_copies(Softmax<T> p, int share, int cluster) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 of_warps[kMostThreads / 32];
  __shared__ float2 of_blocks[kMostCluster];
  __shared__ uint64_t full[kMostChunks];
  __shared__ uint64_t mailed[1];
  constexpr int kCount = Vector<T>::kCount;
  uint4* const vectors = reinterpret_cast<uint4*>(shared);
  const int row = blockIdx.x / cluster, rank = cluster_rank();
  const Part<T, kAny> part(p, row, share, rank);
  const int used = part.used(), chunks = (used + kChunk - 1) / kChunk;

  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk < chunks; ++chunk) barrier_init(full + chunk, 1);
    barrier_init(mailed, 1);
    barrier_init_fence();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int begin = chunk * kChunk, bytes = min(used - begin, kChunk) * 16;
      barrier_expect(full + chunk, bytes);
      bulk_load(vectors + begin, part.vectors() + begin, bytes, full + chunk);
    }
    barrier_expect(mailed, cluster * sizeof(float2));
  }
  __syncthreads();
  cluster_started_arrive();

  Online found;
  if (kAny && rank == 0 && threadIdx.x < part.edges()) {
    const float logits[] = {part.logit(part.edge(threadIdx.x))};
    found.add(logits);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    barrier_wait(full + chunk, 0);  //@ arrived
    const int end = min(used, (chunk + 1) * kChunk);
    // Two vectors at once: the sum is scaled once for both.
    for (int at = chunk * kChunk + threadIdx.x; at < end; at += 2 * blockDim.x) {
      float logits[2 * kCount];
      const int second = at + blockDim.x;
      part.unpack(logits, vectors, at);
      if (second < end) {
        part.unpack(logits + kCount, vectors, second);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) logits[kCount + i] = -INFINITY;
      }
      add(found, logits);
    }
  }
  found = reduce_row(found, of_warps);
  cluster_started_wait();
  if (threadIdx.x < cluster) mail_to_block(of_blocks + rank, float2{found.max, found.sum}, mailed, threadIdx.x);
  barrier_wait(mailed, 0);  //@ mailed
  const int lane = threadIdx.x % kMostCluster;
  const float2 other = lane < cluster ? of_blocks[lane] : float2{-INFINITY, 0.0f};
  const Quotients quotients(reduce_lanes({other.x, other.y}, kMostCluster));

  T* const y = p.y + row * p.y_stride;
  T* const to = y + part.head + part.first * kCount;
  const bool aligned = !kAny || reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll 4
  for (int at = threadIdx.x; at < part.mine; at += blockDim.x) {
    float logits[kCount];
    part.unpack(logits, vectors, at);
#pragma unroll
    for (float& logit : logits) logit = quotients.of(logit);
    if (aligned) {
      reinterpret_cast<uint4*>(to)[at] = Vector<T>(logits).bits;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[at * kCount + i] = T(logits[i]);
    }
  }
  if (kAny && rank == 0 && threadIdx.x < part.edges()) {
    const int at = part.edge(threadIdx.x);
    y[at] = T(quotients.of(part.logit(at)));
  }
}

template <bool kAny, typename T>
void launch_for(const Softmax<T>& p) {
  const int vectors = p.n / Vector<T>::kCount, most = multiprocessors();
  const auto share_of = [&](int cluster) { return (vectors + cluster - 1) / cluster; };
  int cluster = 1, threads = kThreads;
  while (cluster < kMostCluster && share_of(cluster) > kShare) cluster *= 2;
  // A smaller cluster of larger blocks, if these occupy at least 7/8 of the SMs, one on each: all rows start together.
  for (int few = 1; few < cluster; few *= 2) {
    const int64_t blocks = int64_t{p.rows} * few;
    if (blocks <= most && 8 * blocks >= 7 * most && share_of(few) * 16 <= kMostShared) cluster = few, threads = kMostThreads;
  }
  const int share = share_of(cluster), shared = share * 16;
  STD_TORCH_CHECK(shared <= kMostShared, "softmax: x must have at most ", (1 << 20) / sizeof(T),
                  " elements in a row, got ", p.n);
  const int blocks = to_int(int64_t{p.rows} * cluster, "softmax: x");
  STD_CUDA_CHECK(cudaFuncSetAttribute(bulk_copies<T, kAny>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  STD_CUDA_CHECK(launch_clusters(bulk_copies<T, kAny>, cluster, dim3(blocks), threads, shared, p.stream, p, share, cluster));
}

template <typename T>
void launch(const Softmax<T>& p) {
  const auto aligned = [&](const T* rows, int64_t stride) {
    return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % Vector<T>::kCount == 0;
  };
  if (p.bias || p.lengths || p.n % Vector<T>::kCount || !aligned(p.x, p.x_stride) || !aligned(p.y, p.y_stride))
    launch_for<true>(p);
  else
    launch_for<false>(p);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_v06_bulk_copies, minfer::launch)
