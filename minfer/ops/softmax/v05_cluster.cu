// v05_cluster: a row is shared by the blocks of a cluster, up to 8, which keep it in registers and give each other their
// maxima and sums through distributed shared memory.
// Idea: a row of 524,288 elements of a half type fits the registers of 8 blocks, so that each is read once, and small blocks
// leave an SM several to load, to sum and to store at once. A barrier that says that all blocks have started hides behind
// the loads, and another behind the exchange is the only one that is waited for.
// Expected: the copy's speed at (4096, 128256) and (64, 262144) in bfloat16 less what the exchange costs, about a
// microsecond a row, of which an SM has two or four at a time.
// Measured (H100 80GB HBM3, bfloat16, none, rows=4096, n=128256): 2834 GB/s cold, 2821 steady; 192.5 % and 192.3 % of torch.
#include <algorithm>

#include "cuda/cluster.cuh"
#include "cuda/rows.cuh"
#include "online.cuh"

namespace minfer {

constexpr int kMostCluster = 8;  // what every GPU of sm_90 grants

// Each block of the cluster has `share` vectors of the row, the last one what is left.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostRowThreads, kVectors <= 8 ? 2 : 1) shared_row(Softmax<T> p, int vectors, int share, int cluster) {
  __shared__ float2 partial[kMostRowThreads / 32];
  __shared__ float2 of_blocks[kMostCluster];
  cluster_started_arrive();
  const int number = blockIdx.x / cluster, rank = blockIdx.x % cluster, first = rank * share;
  const int valid = p.valid(number), end = min(vectors, first + share);
  Vector<T> x[kVectors];
  load_logits(x, p.x + number * p.x_stride, first + threadIdx.x, blockDim.x, valid, end);
  const Online mine = reduce_row(online(x, p, first + threadIdx.x, blockDim.x), partial);
  cluster_started_wait();
  if (threadIdx.x < cluster) store_at_block(of_blocks + rank, float2{mine.max, mine.sum}, threadIdx.x);
  cluster_sync();
  const int lane = threadIdx.x % kMostCluster;
  const float2 other = lane < cluster ? of_blocks[lane] : float2{-INFINITY, 0.0f};
  const Online row = reduce_lanes({other.x, other.y}, kMostCluster);
  write_row(p.y + number * p.y_stride, x, p, first + threadIdx.x, blockDim.x, end, row);
}

template <int kVectors, typename T>
void launch_cluster(const Softmax<T>& p, int vectors, int share, int cluster) {
  const int threads = (share + 32 * kVectors - 1) / (32 * kVectors) * 32;
  STD_CUDA_CHECK(launch_clusters(shared_row<T, kVectors>, cluster, dim3(p.rows * cluster), threads, 0, p.stream, p,
                                 vectors, share, cluster));
}

// kMost: vectors that a block has at most, while there are blocks left for the cluster.
template <int kMost, typename T>
void launch(const Softmax<T>& p) {
  require_vectors(p);
  const int vectors = p.n / Vector<T>::kCount;
  const auto share_of = [&](int cluster) { return (vectors + cluster - 1) / cluster; };
  int cluster = 1;
  while (cluster < kMostCluster && share_of(cluster) > kMost) cluster *= 2;
  // With few rows, more blocks a row, as long as each thread keeps a vector.
  while (cluster < kMostCluster && int64_t{p.rows} * cluster < multiprocessors() && share_of(2 * cluster) >= kRowThreads)
    cluster *= 2;
  const int share = share_of(cluster);
  STD_TORCH_CHECK(share <= 16 * kMostRowThreads, "softmax: x must have at most ",
                  16 * kMostRowThreads * kMostCluster * Vector<T>::kCount, " elements in a row, got ", p.n);
  to_int(int64_t{p.rows} * cluster, "softmax: x");
  if (share <= kRowThreads) launch_cluster<1>(p, vectors, share, cluster);
  else if (share <= 4 * kRowThreads) launch_cluster<4>(p, vectors, share, cluster);
  else if (share <= 8 * kMostRowThreads) launch_cluster<8>(p, vectors, share, cluster);
  else launch_cluster<16>(p, vectors, share, cluster);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_v05_cluster, minfer::launch<4096>)
MINFER_SOFTMAX(softmax_v05_cluster_small, minfer::launch<2048>)
