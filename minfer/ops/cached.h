// The lengths, the page table and the causal mask of attention over a cache. What a row of the cache holds does not matter.
#pragma once

#include "ops/rows.h"

namespace minfer {

struct Cached {
  const int* lengths;
  const int* page_table;  // null: sequence b is block b
  int64_t table_stride;
  int batch, new_tokens, heads, kv_heads;
  int blocks, slots;  // of the caches
  int most;           // keys that a sequence may have
#ifdef __CUDACC__
  cudaStream_t stream;
#endif

  MINFER_EITHER int group() const { return heads / kv_heads; }

  // Query rows that share a key-value head: row r is head r % group of query r / group.
  MINFER_EITHER int rows() const { return new_tokens * group(); }

  // How many keys a sequence has. A length that does not fit the tensors is clamped.
  MINFER_EITHER int keys(int number) const {
    const int length = lengths[number];
    return length < 0 ? 0 : length > most ? most : length;
  }

  // How many of a sequence's keys a query sees.
  MINFER_EITHER int seen(int query, int keys) const {
    const int count = keys - new_tokens + query + 1;
    return count < 0 ? 0 : count;
  }

  // The block that holds a key. A page out of range becomes page 0, so that nothing is read out of bounds.
  MINFER_EITHER int block_of(int number, int key) const {
    return page_table ? checked(page_table[number * table_stride + key / slots]) : number;
  }
  MINFER_EITHER int checked(int page) const { return unsigned(page) < unsigned(blocks) ? page : 0; }
  MINFER_EITHER int slot_of(int key) const { return page_table ? key % slots : key; }
};

}  // namespace minfer
