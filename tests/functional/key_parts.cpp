// Into how many parts v14_key_parts divides keys.
#include "ops/prefill_attention/key_parts.h"

extern "C" int minfer_count_parts(int64_t items, int64_t blocks, int multiprocessors) {
  return minfer::count_parts(items, blocks, multiprocessors);
}
extern "C" int minfer_least_blocks() { return minfer::kLeastBlocks; }
