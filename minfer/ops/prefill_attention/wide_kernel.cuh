// The kernel of v13_wide_heads, which v17_wide_parts launches, too, where it does not divide keys.
#pragma once

#include "wide_rows.cuh"

namespace minfer {

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ AttentionMaps maps, const __grid_constant__ Attention<T> p, const Order order,
           unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WideTiles<T, kDim, kDimV> tile(shared);
  if (threadIdx.x == 0) tile.init();
  __syncthreads();
  if (warpgroup_index() == kConsumers) {
    registers_down<kFewRegisters>();
    if (threadIdx.x == kConsumers * 128) produce(tile, p, maps, WholeTiles{p, order}, counters);
    return;
  }
  registers_up<kMostRegisters>();
  WideConsumer<T, kDim, kDimV>(tile, p).attend(maps);
}

template <typename T>
void launch(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim > 128, "prefill_attention: this kernel takes heads of 192 and 256, got ", p.dim);
  const auto launch_dims = [&]<int kDim, int kDimV>() {
    using Tile = WideTiles<T, kDim, kDimV>;
    const AttentionMaps maps = make_maps(p, Tile::kBlockN, kRowsOfWarp, Tile::kValues);
    const Order order = make_order(p, kL2Bytes);
    const auto kernel = attend<T, kDim, kDimV>;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
    const int blocks = order.pieces() < multiprocessors() ? order.pieces() : multiprocessors();
    kernel<<<blocks, kThreads, Tile::kBytes, p.stream>>>(maps, p, order, counters_of(p.stream));
  };
  if (p.dim == 256) launch_dims.template operator()<256, 256>();
  else p.v_dim == 192 ? launch_dims.template operator()<192, 192>() : launch_dims.template operator()<192, 128>();
}

}  // namespace minfer
