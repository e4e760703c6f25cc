// v04_wgmma: Hopper's copy engine and warpgroup products: one thread copies, two warpgroups of 64 rows multiply.
// Idea: TMA copies q once, and keys and values in two stages of 128, so that copies take no registers and no time of the other
// threads. For the scores both operands are in shared memory; out += p v takes p from registers, where the softmax left it. A
// warpgroup waits for its own products, and while it computes exponentials, the other one has the tensor cores. Nothing
// enforces that: it happens when the two are out of step.
// Expected: 128 x 128 scores of head_dim 128 are 1024 + 1024 cycles of the tensor cores for both warpgroups, and 2 · 64 · 128
// exponentials at 16 a cycle and SM are 512 + 512; with maxima, sums and rounding the softmax is about 1000 cycles of each
// warpgroup. If half of that is hidden: 60 to 65 % of wgmma's rate, 500 TFLOP/s.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=16384, seq_kv=16384, heads=32, kv_heads=32, head_dim=128): 546.2
//   TFLOP/s cold; 90.1 % of torch.
#include "hopper_attention.cuh"

namespace minfer {

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order) {
  using Tile = Tiles<T, kDim, kDimV>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  const Work w = work_of<Tile::kBlockN>(p, blockIdx.x, order);
  if (!w.exists()) return;
  Ring<Tile::kStages> ring;
  if (warpgroup_index() == kConsumers) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) tile.load(p, maps, w, ring, 0);
    return;
  }
  registers_up<kConsumerRegisters>();
  Rows64<Tile> rows(tile, p);
  rows.clear();
  if (w.blocks > 0) barrier_wait(tile.full_q, 0);
#pragma unroll 1
  for (int i = w.blocks - 1; i >= 0; --i, ring.advance()) {
    typename Rows64<Tile>::Scores scores;
    typename Rows64<Tile>::Exponentials exponentials;
    barrier_wait(tile.full_k + ring.stage, ring.parity);
    rows.start_scores(scores, ring.stage);
    wgmma_wait_for<0>(scores);  //@ scores_done
    rows.release(tile.empty_k + ring.stage);  //@ release_k
    rows.mask(scores, w, i);
    float rescale[2];
    if (rows.online.add(scores, rows.factor, rescale)) scale_rows(rows.out, rescale);
    rows.round(exponentials, scores);
    barrier_wait(tile.full_v + ring.stage, ring.parity);
    rows.clear_tail(w, i, ring.stage);  //@ clear_tail
    rows.start_out(exponentials, ring.stage);
    wgmma_wait_for<0>(rows.out);
    rows.release(tile.empty_v + ring.stage);
  }
  rows.store(maps, w);
  if (threadIdx.x % 32 == 0) tma_store_wait<0>();
}

template <typename T>
void launch(const Attention<T>& p) {
  for_dims(p.dim, p.v_dim, [&]<int kDim, int kDimV>() {
    using Tile = Tiles<T, kDim, kDimV>;
    const AttentionMaps maps = make_maps(p, Tile::kBlockN);
    const Order order = make_order(p);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
    kernel<<<order.pieces(), kThreads, Tile::kBytes, p.stream>>>(maps, p, order);
  });
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v04_wgmma, minfer::launch)
