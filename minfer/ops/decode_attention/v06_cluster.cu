// v06_cluster: the blocks that share a head's keys are a cluster, and add their parts through shared memory.
// Idea: a step of one request over a short context is latencies: of the launch, the length, the table, the keys, and then in v03
// of parts that go to memory, a fence, a counter and parts that come back. Here the parts stay in shared memory: one barrier of
// the cluster, and each block adds the parts of its share of the columns. A part may be as short as a unit for each warp, so that
// 1024 keys of 8 heads are 128 blocks. The launch begins before the previous one has ended, and waits for it on the device.
// Expected: at one request, 1024 keys and 8 key-value heads 5 us where v03 takes 8; no gain where a block has much to read.
#include "cuda/cluster.cuh"
#include "cuda/dependent.cuh"
#include "packed.cuh"

namespace minfer {

constexpr int kMostBlocks = 16;  // of a cluster
constexpr int kLeast = 64;       // keys of a part: a unit for each of four warps

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    clustered(Decode<typename Shape::T, typename Shape::KV> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float2 stats[Shape::kWarps][Shape::kRows];
  __shared__ float4 sums_of_part[Shape::kRows][Shape::kDim / 4];
  __shared__ float2 stats_of_part[Shape::kRows];
  const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows, splits = gridDim.x, part = blockIdx.x;
  const int number = blockIdx.z, kv_head = blockIdx.y / tiles, row0 = blockIdx.y % tiles * Shape::kRows;
  let_next_start();
  // The pages are not known before the length is. The table's row is brought to the L2 meanwhile.
  if (p.page_table && int(threadIdx.x) * 32 * p.slots < p.most)
    prefetch_l2(p.page_table + number * p.table_stride + threadIdx.x * 32);
  wait_for_previous();
  PackedWarp<Shape> warp(p, shared);
  warp.load_q(number, kv_head, row0);
  const int keys = p.keys(number), units = (keys + kUnit - 1) / kUnit;
  const int each = (units + splits - 1) / splits, begin = min(part * each, units);
  const Piece piece{number, kv_head, row0, keys, begin, min(begin + each, units)};
  warp.start(piece);
  warp.run(piece);
  const int rows = min(Shape::kRows, p.rows() - row0);
  warp.leave(shared, stats[threadIdx.x / 32], rows);
  add_warps<Shape>(shared, stats, rows, [&](int row, int column, const Merged& all) {
    if (splits == 1) return store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
    sums_of_part[row][column / 4] = all.sums;
    if (column == 0) stats_of_part[row] = {all.base, all.total};
  });
  if (splits == 1) return;
  cluster_sync();  //@ parts_there
  for (int i = threadIdx.x * splits + part; i < rows * (Shape::kDim / 4); i += Shape::kThreads * splits) {
    const int row = i / (Shape::kDim / 4), column = i % (Shape::kDim / 4) * 4;
    const Merged all = merge<kMostBlocks / 2>(
        splits, [&](int block) { return *at_block(&stats_of_part[row], block); },  //@ of_block
        [&](int block) { return *at_block(&sums_of_part[row][column / 4], block); });
    store_out(p, number, kv_head, row0 + row, column, all.divided(p.scale_of_v()));
  }
  cluster_sync();  // all have read what this block left
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  for_shape(p, [&]<typename Shape>() {
    const int tiles = (p.rows() + Shape::kRows - 1) / Shape::kRows;
    const int64_t items = int64_t(p.batch) * p.kv_heads * tiles;
    STD_TORCH_CHECK(p.batch <= 65535 && p.kv_heads * tiles <= 65535,
                    "decode_attention: more sequences and heads than a launch has blocks");
    const int most = std::min(split_count(items, Shape::kResident * multiprocessors(), p.most, kLeast), kMostBlocks);
    int splits = 1;
    while (2 * splits <= most) splits *= 2;
    allow_shared(clustered<Shape>, Shape::kBytes);
    STD_CUDA_CHECK(cudaFuncSetAttribute(clustered<Shape>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    STD_CUDA_CHECK(launch_early(clustered<Shape>, splits, dim3(splits, p.kv_heads * tiles, p.batch), Shape::kThreads,
                                Shape::kBytes, p.stream, p));
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v06_cluster, minfer::launch)
