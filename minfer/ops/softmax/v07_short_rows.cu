// v07_short_rows: rows of up to 1024 elements, which may start and end anywhere. Up to 64 elements, a warp has several rows.
// Idea: rows of attention scores are short: with 7 keys, a block or a program for each row leaves most of its threads without
// an element. Here a row has a lane for every four elements, rounded up to a power of two, 32 at most, and needs neither
// shared memory nor a barrier. Lanes read single elements, next to each other, so a warp still reads whole sectors.
// Expected: (7430, 7) in bfloat16 takes the time of a launch, 5.5 us, where triton_rows starts 7430 programs and takes 9.7.
#include "online.cuh"

namespace minfer {

constexpr int kThreads = 128, kMost = 1024;

// Each row has `lanes` lanes, a power of two. A lane has kEach elements, `lanes` apart.
template <typename T, int kEach>
__global__ void __launch_bounds__(kThreads) short_rows(Softmax<T> p, int lanes) {
  const int lane = threadIdx.x % lanes, row = blockIdx.x * (kThreads / lanes) + threadIdx.x / lanes;
  const bool exists = row < p.rows;
  const int valid = exists ? p.valid(row) : 0;
  const T* x = p.x + row * p.x_stride;
  float logits[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = lane + i * lanes;
    logits[i] = at < valid ? float(x[at]) : -INFINITY;  //@ valid
    if (p.bias && at < valid) logits[i] += float(p.bias[at]);
  }
  Online found;
  found.add(logits);
  found = reduce_lanes(found, lanes);  //@ lanes_of_row
  const float base = base_of(found.max), scale = 1.0f / found.sum;
  T* y = p.y + row * p.y_stride;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int at = lane + i * lanes; exists && at < p.n) y[at] = T(power(logits[i], base) * scale);
}

template <typename T>
void launch(const Softmax<T>& p) {
  STD_TORCH_CHECK(p.n <= kMost, "softmax: this kernel takes rows of up to ", kMost, " elements, got ", p.n);
  int lanes = 1;
  while (lanes < 32 && lanes * 4 < p.n) lanes *= 2;
  const int of_block = kThreads / lanes, blocks = (p.rows + of_block - 1) / of_block;
  if (p.n <= lanes * 8)
    short_rows<T, 8><<<blocks, kThreads, 0, p.stream>>>(p, lanes);
  else
    short_rows<T, 32><<<blocks, kThreads, 0, p.stream>>>(p, lanes);
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_v07_short_rows, minfer::launch)
