// What every CUDA and C++ mla_decode kernel is given, and how it becomes a torch op. `__init__.py` says what is computed.
//
// A kernel file defines `template <typename T> void launch(const Mla<T>&)` and ends with
// `MINFER_MLA_DECODE(mla_decode_<file name>, minfer::launch)`. T is Half or BFloat16.
#pragma once

#include "ops/cached.h"

namespace minfer {

constexpr int kLatent = 512, kRope = 64, kRow = kLatent + kRope;

// All heads share the rows of the cache, so there is one key-value head. Query row r is head r % heads of query r / heads.
template <typename T>
struct Mla : Cached {
  using Element = T;
  static constexpr int dim = kLatent;  // of out
  Rows<T> out;
  Rows<const T> q, cache;  // of_head of the cache is 0
  float scale;

  MINFER_EITHER static float scale_of_v() { return 1.0f; }
  MINFER_EITHER const T* key_at(int number, int key) const { return cache.at(block_of(number, key), slot_of(key), 0); }
  MINFER_EITHER const T* query_at(int number, int row) const { return q.at(number, row / heads, row % heads); }
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const Mla<T>& p) {
  check_rows_in_pieces(p.out, kLatent, "mla_decode: out"), check_rows_in_pieces(p.q, kRow, "mla_decode: q");
  check_rows_in_pieces(p.cache, kRow, "mla_decode: cache");
}

template <typename T>
Mla<T> make_mla(const Tensor& out, const Tensor& q, const Tensor& lengths, const Tensor& page_table, const Tensor& cache,
                double scale) {
  Mla<T> p;
  p.q = make_rows(q, input<T>(q, "mla_decode: q"), "mla_decode: q");
  p.out = make_rows(out, output<T>(out, "mla_decode: out"), "mla_decode: out");
  check_rank(cache, "mla_decode: cache", 3), check_rows(cache, "mla_decode: cache");
  const int64_t batch = q.size(0), fresh = q.size(1), heads = q.size(2), blocks = cache.size(0), slots = cache.size(1);
  p.cache = {input<T>(cache, "mla_decode: cache"), blocks > 1 ? cache.stride(0) : 0, slots > 1 ? cache.stride(1) : 0, 0};
  check_sizes(q, "mla_decode: q", {batch, fresh, heads, kRow});
  check_sizes(out, "mla_decode: out", {batch, fresh, heads, kLatent});
  check_sizes(lengths, "mla_decode: lengths", {batch});
  check_rank(page_table, "mla_decode: page_table", 2);
  const int64_t pages = page_table.size(1);
  check_sizes(page_table, "mla_decode: page_table", {batch, pages});
  const bool paged = pages > 0;
  check_sizes(cache, "mla_decode: cache", {paged ? blocks : batch, slots, kRow});
  STD_TORCH_CHECK(fresh >= 1 && fresh <= 8, "mla_decode: q must have 1 to 8 new tokens a sequence, got ", fresh);
  STD_TORCH_CHECK(!paged || slots == 64, "mla_decode: cache must have pages of 64 slots, got ", slots);
  STD_TORCH_CHECK(scale > 0, "mla_decode: scale must be above 0, got ", scale);
  check_contiguous(lengths, "mla_decode: lengths"), check_rows(page_table, "mla_decode: page_table");

  p.lengths = input<int32_t>(lengths, "mla_decode: lengths");
  p.page_table = paged ? input<int32_t>(page_table, "mla_decode: page_table") : nullptr;
  p.table_stride = batch > 1 ? page_table.stride(0) : 0;
  p.batch = to_int(batch, "mla_decode: q"), p.new_tokens = static_cast<int>(fresh), p.kv_heads = 1;
  p.heads = to_int(heads, "mla_decode: q");
  p.blocks = to_int(blocks, "mla_decode: cache"), p.slots = to_int(slots, "mla_decode: cache");
  p.most = to_int(paged ? pages * slots : slots, "mla_decode: page_table");
  STD_TORCH_CHECK(p.most <= INT_MAX / 4, "mla_decode: page_table must name fewer than 2^29 slots a sequence");
  STD_TORCH_CHECK(heads * fresh <= INT_MAX / 2, "mla_decode: q must have fewer than 2^30 rows a sequence, got ", heads * fresh);
  p.scale = static_cast<float>(scale);
#ifdef __CUDACC__
  p.stream = stream_of(q);
#endif
  return p;
}

// Calls launch(Mla<T>) with the T of the tensors. An empty out launches nothing.
template <typename Launch>
void dispatch(const Tensor& out, const Tensor& q, const Tensor& lengths, const Tensor& page_table, const Tensor& cache,
              double scale, Launch launch) {
  dispatch<Half, BFloat16>(q.scalar_type(), "mla_decode: q", [&]<typename T>() {
    const Mla<T> p = make_mla<T>(out, q, lengths, page_table, cache, scale);
    if (out.numel() > 0) launch(p);
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_MLA_DECODE(NAME, LAUNCH)                                                                           \
  static void NAME(minfer::Tensor out, const minfer::Tensor q, const minfer::Tensor lengths,                     \
                   const minfer::Tensor page_table, const minfer::Tensor cache, double scale) {                  \
    minfer::dispatch(out, q, lengths, page_table, cache, scale, [](const auto& p) { LAUNCH(p); });               \
  }                                                                                                              \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor q, Tensor lengths, Tensor page_table, Tensor cache, float scale) -> ()")
