// blocks: a block for each page of each sequence, which copies what of it is used.
#include "ops/op.h"

using minfer::Tensor;

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gather(T* packed, const int32_t* table, const int32_t* starts, const T* cache, int page, int dim) {
  const int first = starts[blockIdx.y], length = starts[blockIdx.y + 1] - first, begin = blockIdx.x * page;
  if (begin >= length) return;  // and what the table has here is not read
  const int64_t from = static_cast<int64_t>(table[blockIdx.y * gridDim.x + blockIdx.x]) * page * dim;
  const int64_t to = static_cast<int64_t>(first + begin) * dim;
  const int count = min(page, length - begin) * dim;
  for (int i = threadIdx.x; i < count; i += kThreads) packed[to + i] = cache[from + i];
}

static void foreign_gather_blocks(Tensor packed, const Tensor table, const Tensor starts, const Tensor cache) {
  const int page = minfer::to_int(cache.size(1), "gather: cache"), dim = minfer::to_int(cache.size(2), "gather: cache");
  minfer::check_sizes(packed, "gather: packed", {packed.size(0), dim});
  minfer::check_sizes(starts, "gather: cu_seqlens", {table.size(0) + 1});
  minfer::check_contiguous(packed, "gather: packed");
  minfer::check_contiguous(table, "gather: page_table");
  minfer::check_contiguous(cache, "gather: cache");
  const cudaStream_t stream = minfer::stream_of(cache);
  const dim3 grid(minfer::to_int(table.size(1), "gather: page_table"), minfer::to_int(table.size(0), "gather: page_table"));
  const int32_t* pages = minfer::input<int32_t>(table, "gather: page_table");
  const int32_t* start = minfer::input<int32_t>(starts, "gather: cu_seqlens");
  minfer::dispatch<float, minfer::Half, minfer::BFloat16>(cache.scalar_type(), "gather: cache", [&]<typename T>() {
    T* to = minfer::output<T>(packed, "gather: packed");
    const T* from = minfer::input<T>(cache, "gather: cache");
    gather<T><<<grid, kThreads, 0, stream>>>(to, pages, start, from, page, dim);
  });
  minfer::check_launch();
}

MINFER_OP(foreign_gather_blocks, "(Tensor(a!) packed, Tensor page_table, Tensor cu_seqlens, Tensor cache) -> ()")
