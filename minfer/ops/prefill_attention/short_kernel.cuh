// The kernel of v07_short, which v14_key_parts launches, too, where it does not divide keys.
#pragma once

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
    if (warp == 1) take_items(tile, Items{p, order, log_packed}, counters);
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
