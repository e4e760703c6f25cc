// Into how many parts v14_key_parts divides keys, or v17_wide_parts.
#include "ops/prefill_attention/key_parts.h"

extern "C" int minfer_count_parts(int64_t items, int64_t blocks, int multiprocessors, bool wide) {
  using namespace minfer;
  return wide ? count_parts(items, blocks, multiprocessors, kLeastWide, kBesidesWide)
              : count_parts(items, blocks, multiprocessors);
}
extern "C" int minfer_least_blocks(bool wide) { return wide ? minfer::kLeastWide : minfer::kLeastBlocks; }
