// v07_short: for many short sequences: a tile takes less time besides its products, and fewer products are of hidden pairs.
// Idea: five changes to v06, whose tiles of 128 queries take, besides their steps, the time of three steps more. (1) The two
// warpgroups do not take turns. Each has its own queries and its own position in the ring of keys, and ends on its own: one
// stores a tile while the other multiplies the next. (2) The rows of a tile are the queries of several heads that share keys,
// for example 16 queries of 8 heads: keys are read once for all of them, and a sequence of 20 tokens fills a tile. (3) Blocks
// have 64 keys, and a warpgroup multiplies only those that its own 64 rows see: at 512 tokens, causal, 1/9 of the products are
// of hidden pairs, and 1/5 in v06. (4) Queries are in registers: from shared memory, a product with 64 keys would read 128
// bytes a cycle, which is all that it delivers. That leaves room for five stages of keys and five of values, and the copies for
// the next tile begin a whole tile ahead. (5) A warp of its own takes tiles, so that no copy waits for the counter.
// Expected: 8 x 512 causal with 8 key-value heads reads and writes 84 MB, which takes 28 us at an H100's 3 TB/s. v06 takes 66
// us, 45 % of it in its steps. If the steps of the other warpgroup hide the rest: 40 us, 430 TFLOP/s.
// Measured (H200, bfloat16, packed, full, no, batch=32, seq_q=16, seq_kv=4096, heads=32, kv_heads=8, head_dim=128): 211.5
//   TFLOP/s cold; 491.8 % of torch.
#include "short_rows.cuh"

namespace minfer {

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreadsOfBlock, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           int log_packed, unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ShortTiles<T, kDim> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kWarpgroups) {
    registers_down<kFewRegisters>();
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 1) take_items(tile, p, order, log_packed, counters);
    else if (threadIdx.x == kWarpgroups * 128) copy_items(tile, p, maps, log_packed);
    return;
  }
  registers_up<kMostRegisters>();
  Consumer<T, kDim>(tile, p, log_packed).attend(maps);
}

template <typename T>
void launch(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim == 64 || p.dim == 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const auto launch_dim = [&]<int kDim>() {
    constexpr int kBytes = ShortTiles<T, kDim>::kBytes;
    const int log_packed = find_log_packed(p);
    const AttentionMaps maps = make_packed_maps(p, kKeys, 1 << log_packed);
    const Order order = make_packed_order(p, log_packed);
    const auto kernel = attend<T, kDim>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreadsOfBlock, kBytes, p.stream>>>(maps, p, order, log_packed, counters_of(p.stream));
  };
  p.dim == 64 ? launch_dim.template operator()<64>() : launch_dim.template operator()<128>();
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v07_short, minfer::launch)
