// TMA boxes of several neighbouring heads of the same tokens. `tma_load_heads` and `tma_store_heads` copy them.
#pragma once

#include "cuda/tma_heads.cuh"

namespace minfer {

// As `make_heads_map`, with boxes of `box_heads` heads for each of `box_tokens` tokens. In shared memory, row r of a box is
// head r % box_heads of token r / box_heads.
template <typename T>
bool make_grouped_heads_map(HeadsMap& map, const T* begin, int batch, int tokens, int heads, int dim, int64_t of_batch,
                            int64_t of_token, int64_t of_head, int box_tokens, int box_heads) {
  const auto encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {cuuint64_t(dim), cuuint64_t(heads), cuuint64_t(tokens), cuuint64_t(batch)};
  const auto bytes = [&](int64_t stride) { return cuuint64_t(stride > 0 ? stride : dim) * sizeof(T); };
  const cuuint64_t strides[] = {bytes(of_head), bytes(of_token), bytes(of_batch)};
  const cuuint32_t box[] = {64, cuuint32_t(box_heads), cuuint32_t(box_tokens), 1}, steps[] = {1, 1, 1, 1};
  return encode && encode(&map.map, tensor_map_type<T>(), 4, const_cast<T*>(begin), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace minfer
