// entries: sequence by sequence, a copy for each entry.
#include <cstring>

#include "ops/op.h"

using minfer::Tensor;

static void foreign_gather_entries(Tensor packed, const Tensor table, const Tensor starts, const Tensor cache) {
  const int64_t page = cache.size(1), dim = cache.size(2), sequences = table.size(0);
  minfer::check_sizes(packed, "gather: packed", {packed.size(0), dim});
  minfer::check_sizes(starts, "gather: cu_seqlens", {sequences + 1});
  minfer::check_dtype(packed, "gather: packed", cache.scalar_type());
  minfer::check_contiguous(packed, "gather: packed");
  minfer::check_contiguous(cache, "gather: cache");
  const int32_t* pages = minfer::input<int32_t>(table, "gather: page_table");
  const int32_t* start = minfer::input<int32_t>(starts, "gather: cu_seqlens");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(cache.scalar_type(), "gather: cache", [&]<typename T>() {
    T* to = minfer::output<T>(packed, "gather: packed");
    const T* from = minfer::input<T>(cache, "gather: cache");
    for (int64_t i = 0; i < sequences; ++i) {
      for (int64_t j = 0; j < start[i + 1] - start[i]; ++j, to += dim) {
        const int64_t entry = pages[i * table.size(1) + j / page] * page + j % page;
        std::memcpy(to, from + entry * dim, dim * sizeof(T));
      }
    }
  });
}

MINFER_OP(foreign_gather_entries, "(Tensor(a!) packed, Tensor page_table, Tensor cu_seqlens, Tensor cache) -> ()")
