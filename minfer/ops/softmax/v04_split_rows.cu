// v04_split_rows: several blocks a row, which leave their maxima and sums in memory; a second kernel reads all of a row's
// and writes the result.
// Idea: 64 rows of 262144 elements are work for the whole GPU, on any GPU from sm_80 on. The second kernel reads x anew,
// which the L2 still has where x is smaller, and it goes backwards, because what was read last is what the L2 keeps.
// Expected: at (64, 262144) in bfloat16, 34 MB, one read of memory and one of the L2, and one launch more than v03_one_read,
// but four times as many blocks as it has; for many long rows 2/3 of the copy's speed, because x is read twice.
// Measured (H100 80GB HBM3, bfloat16, none, rows=4096, n=128256): 2053 GB/s cold, 2041 steady; 139.4 % and 139.1 % of torch.
#include <torch/csrc/stable/ops.h>

#include "online.cuh"

namespace minfer {

constexpr int kThreads = 256, kVectors = 4;
constexpr int kPart = kThreads * kVectors;  // vectors of a block

// The part of a row that a block has, and which vectors of it are to be read.
template <typename T>
struct Part {
  int row, first, valid;
  const T* x;

  __device__ Part(const Softmax<T>& p, int block, int parts)
      : row(block / parts), first(block % parts * kPart), valid(p.valid(row)), x(p.x + row * p.x_stride) {}

  __device__ void load(Vector<T> (&to)[kVectors]) const {
    load_logits(to, x, first + threadIdx.x, kThreads, valid, first + kPart);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_parts(Softmax<T> p, float2* sums, int parts) {
  __shared__ float2 partial[kThreads / 32];
  const Part<T> part(p, blockIdx.x, parts);
  Vector<T> x[kVectors];
  part.load(x);
  const Online mine = reduce_row(online(x, p, part.first + threadIdx.x, kThreads), partial);
  if (threadIdx.x == 0) sums[blockIdx.x] = float2{mine.max, mine.sum};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) divide(Softmax<T> p, const float2* sums, int parts) {
  __shared__ float2 partial[kThreads / 32];
  const Part<T> part(p, gridDim.x - 1 - blockIdx.x, parts);
  Vector<T> x[kVectors];
  part.load(x);
  Online mine;
  for (int i = threadIdx.x; i < parts; i += kThreads) {
    const float2 other = sums[int64_t(part.row) * parts + i];  //@ sums_of_row
    const float highest = fmaxf(mine.max, other.x), base = base_of(highest);
    mine = {highest, mine.sum * power(mine.max, base) + other.y * power(other.x, base)};
  }
  const Online row = reduce_row(mine, partial);
  const int vectors = p.n / Vector<T>::kCount;
  write_row(p.y + part.row * p.y_stride, x, p, part.first + threadIdx.x, kThreads, vectors, row);
}

template <typename T>
void launch(const Softmax<T>& p) {
  require_vectors(p);
  const int vectors = p.n / Vector<T>::kCount, parts = (vectors + kPart - 1) / kPart;
  const int blocks = to_int(int64_t(p.rows) * parts, "softmax: x");
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  const Tensor scratch = torch::stable::empty({2LL * blocks}, ScalarType::Float, std::nullopt,
                                              torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
  float2* sums = static_cast<float2*>(scratch.mutable_data_ptr());
  sum_parts<T><<<blocks, kThreads, 0, p.stream>>>(p, sums, parts);
  divide<T><<<blocks, kThreads, 0, p.stream>>>(p, sums, parts);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_v04_split_rows, minfer::launch)
