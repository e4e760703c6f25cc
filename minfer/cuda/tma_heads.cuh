// Boxes of one head's tokens by the copy engine: of a tensor of rows (batch, token, head) with any strides.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// The tensor map. It has 4 dimensions, so that what is behind a sequence's last token is read as zero, and not as the first
// token of the next sequence.
struct HeadsMap {
  TensorMap map;
};

__device__ inline void tma_prefetch(const HeadsMap& map) { tma_prefetch(map.map); }

// One thread starts the copy of 64 columns from `x` on, for as many tokens as the map's boxes have; `barrier` counts the bytes.
// The box is in the 128-byte swizzle.
__device__ inline void tma_load_heads(void* box, const HeadsMap& map, uint64_t* barrier, int x, int head, int token,
                                      int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(box)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(head), "r"(token), "r"(batch)
      : "memory");
}

// The same to each block of the cluster whose bit is in `blocks`: to the same place in its shared memory, with the bytes
// counted at its own barrier.
__device__ inline void tma_load_heads_multicast(void* box, const HeadsMap& map, uint64_t* barrier, int x, int head, int token,
                                                int batch, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(box)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(head), "r"(token), "r"(batch), "h"(blocks)
      : "memory");
}

// One thread starts the copy of such a box to memory; tma_store_commit closes its group.
__device__ inline void tma_store_heads(const HeadsMap& map, const void* box, int x, int head, int token, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(box)), "r"(x), "r"(head), "r"(token), "r"(batch)
               : "memory");
}

// Takes sizes, and strides in elements, which are multiples of 8; the columns of a row are contiguous. A stride of 0 is allowed
// in a dimension of size 1. False when the driver refuses.
template <typename T>
bool make_heads_map(HeadsMap& map, const T* begin, int batch, int tokens, int heads, int dim, int64_t of_batch,
                    int64_t of_token, int64_t of_head, int box_tokens) {
  const auto encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {cuuint64_t(dim), cuuint64_t(heads), cuuint64_t(tokens), cuuint64_t(batch)};
  const auto bytes = [&](int64_t stride) { return cuuint64_t(stride > 0 ? stride : dim) * sizeof(T); };
  const cuuint64_t strides[] = {bytes(of_head), bytes(of_token), bytes(of_batch)};
  const cuuint32_t box[] = {64, 1, cuuint32_t(box_tokens), 1}, steps[] = {1, 1, 1, 1};
  return encode && encode(&map.map, tensor_map_type<T>(), 4, const_cast<T*>(begin), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace minfer
