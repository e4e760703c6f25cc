// cpu_rows: a memcpy a row, threads over the rows.
// Idea: the C library's copy has the widest loads and stores of the machine.
// Expected: the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

#include "embedding.h"

namespace minfer {

template <typename T, typename Id>
void launch(const Embedding<T, Id>& p) {
  const int64_t rows = 1 + 16384 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t id = p.ids[row];
      T* y = p.y + row * p.y_stride;
      if (id >= 0 && id < p.vocab)
        std::memcpy(y, p.table + id * p.table_stride, p.hidden * sizeof(T));
      else
        std::fill_n(y, p.hidden, static_cast<T>(NAN));
    }
  });
}

}  // namespace minfer

MINFER_EMBEDDING(embedding_cpu_rows, minfer::launch)
