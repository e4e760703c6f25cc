// The emulator's own `minfer/cuda/tma_grouped_heads.cuh`.
#pragma once

#include "cuda/tma_heads.cuh"

namespace minfer {

template <typename T>
bool make_grouped_heads_map(HeadsMap& map, const T* begin, int batch, int tokens, int heads, int dim, int64_t of_batch,
                            int64_t of_token, int64_t of_head, int box_tokens, int box_heads) {
  if (!make_heads_map(map, begin, batch, tokens, heads, dim, of_batch, of_token, of_head, box_tokens)) return false;
  map.box_heads = box_heads;
  return box_heads > 0 && box_heads <= 256;
}

}  // namespace minfer
