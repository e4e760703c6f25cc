// v12_fp8: v03 over keys and values in fp8, side by side or in pages of any power of two, so that a prompt can follow a cache
// that decode_attention reads.
// Idea: cp.async copies the bytes of the next tile of keys and values while the present one is multiplied: half of v03's bytes,
// in half the copies. Once for a tile, the block's threads widen the bytes to q's dtype, which is exact, into the tiles that v03
// has. The scale of keys is a part of the scale of scores. The sums are multiplied once by that of values.
// Expected: 0.8 to 0.9 of v03's speed, and so more than v09's, whose tiles of heads of 128 have half the keys on Hopper. For a
// tile of 64 keys x 128 a thread has 64 conversions of pairs and 16 stores of 16 bytes beside the 256 products of 16 x 8 x 16 of
// its warp, and only the other block of the SM overlaps them. Many queries share the keys, so half the bytes save memory, and
// hardly time.
// Measured (H200, bfloat16, packed, full, no, 16, fp8, batch=1, seq_q=512, seq_kv=32768, heads=32, kv_heads=8, head_dim=128):
//   132.5 TFLOP/s cold; 72.9 % of torch.
#include "cuda/fp8.cuh"
#include "fp8_attention.h"
#include "mma_attention.cuh"

namespace minfer {

// Returns x, but hides that from the compiler, so that it keeps nothing in registers through a loop that could be computed from x
// again: with threadIdx.x itself, heads of 128 spill 152 bytes (sm_90a).
__device__ inline int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Two e4m3 numbers, in the lower half of `two`, as T, which is exact.
template <typename T>
__device__ uint32_t widened(uint32_t two) {
  const uint32_t halves = e4m3_to_halves(two);
  if constexpr (std::is_same_v<T, Half>) return halves;
  using Pair = typename Vector<T>::Pair;
  const float2 values = to_floats(reinterpret_cast<const __half2&>(halves));
  uint32_t pair;
  round_to(reinterpret_cast<Pair&>(pair), values.x, values.y);
  return pair;
}

// Widens a tile whose rows of bytes lie one behind the other.
template <typename Place, int kRows, int kCols, int kThreads, typename T>
__device__ void widen_tile(T* tile, const Float8E4M3* bytes) {
  constexpr int kOfRow = kCols / 8;
  static_assert(kRows * kOfRow % kThreads == 0);
  const int thread = anew(threadIdx.x);
#pragma unroll
  for (int n = 0; n < kRows * kOfRow; n += kThreads) {
    const int piece = n + thread;
    const uint2 from = *reinterpret_cast<const uint2*>(bytes + piece * 8);
    const uint4 to = {widened<T>(from.x), widened<T>(from.x >> 16), widened<T>(from.y), widened<T>(from.y >> 16)};
    *reinterpret_cast<uint4*>(tile + Place::at(piece / kOfRow, piece % kOfRow * 8)) = to;
  }
}

// Starts copying kRows rows of kOfRow pieces of 16 bytes each; the rows from `rows_left` on are zero, and are not read. to(row,
// i) and from(row, i) are where piece i of a row begins.
template <int kRows, int kOfRow, int kThreads, typename To, typename From>
__device__ void copy_pieces(To to, From from, int rows_left) {
  constexpr int kPieces = kRows * kOfRow;
  const int thread = anew(threadIdx.x);
#pragma unroll
  for (int n = 0; n < kPieces; n += kThreads) {
    const int piece = n + thread, row = piece / kOfRow, i = piece % kOfRow;
    if (kPieces % kThreads != 0 && piece >= kPieces) break;
    cp_async_16(to(row, i), from(row, i), row < rows_left);
  }
}

// The tiles of a Shape, and behind them the bytes of the next k and v.
template <typename Shape>
constexpr int kBytesOf = Shape::kBytes + Shape::kK + Shape::kV;

template <typename Shape, typename P>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident) attend_fp8(P p) {
  using T = typename Shape::T;
  using Place = typename Shape::Place;
  using PlaceV = typename Shape::PlaceV;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  extern __shared__ __align__(128) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T *k_tile = q_tile + Shape::kQ, *v_tile = k_tile + Shape::kK;
  Float8E4M3 *k_bytes = reinterpret_cast<Float8E4M3*>(v_tile + Shape::kV), *v_bytes = k_bytes + Shape::kK;
  __shared__ int pages[P::kPaged ? 2 * kKeys : 1];  // the numbers of the pages of two tiles of keys, in turn

  const QueryTile tile = query_tile<kRows>(p);
  if (tile.number < 0) return;
  const Sequence s = tile.s;
  const int head = blockIdx.y, kv_head = p.kv_head(head);
  const int last = min(tile.row0 + kRows, s.queries) - 1;
  // Keys that any row sees, from a multiple of kKeys on; none where all rows lie behind the queries.
  const int begin = p.span(s, tile.row0).begin / kKeys * kKeys, end = last >= tile.row0 ? p.span(s, last).end : 0;
  p.scale *= p.scales[0];  //@ scale_of_k

  // Starts copying the number of the page of each key of a tile.
  const auto pages_of = [&](int key) { return pages + key / kKeys % 2 * kKeys; };
  const auto look_up = [&](int first) {
    if constexpr (P::kPaged) {
      const int key = first + threadIdx.x;
      if (threadIdx.x < kKeys)
        cp_async_few<4>(pages_of(first) + threadIdx.x, p.entry_of(tile.number, key), key < end);  //@ page_there
    }
  };
  // Starts copying the bytes of a tile of keys and values, and the numbers of the pages of the next one: a group of copies.
  const auto copy = [&](int first) {
    const auto row_at = [&](const Rows<const Float8E4M3>& rows, int row) {
      if constexpr (P::kPaged)
        return p.at_place(rows, p.place_in(pages_of(first)[row], first + row), kv_head);  //@ page_of_bytes
      else return rows.at(tile.number, s.first_kv + first + row, kv_head);
    };
    const auto copy_rows_of = [&]<int kCols>(Float8E4M3* bytes, const Rows<const Float8E4M3>& rows) {
      const auto to = [&](int row, int i) { return bytes + row * kCols + i * 16; };
      const auto from = [&](int row, int i) { return row_at(rows, row) + i * 16; };
      copy_pieces<kKeys, kCols / 16, kThreads>(to, from, end - first);
    };
    if (first < end) {
      copy_rows_of.template operator()<Shape::kDim>(k_bytes, p.k);
      copy_rows_of.template operator()<Shape::kDimV>(v_bytes, p.v);
      look_up(first + kKeys);  //@ next_pages
    }
    cp_async_commit();
  };
  if constexpr (P::kPaged) {
    look_up(begin);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }
  const T* queries = p.q.at(tile.number, s.first_q + tile.row0, head);
  copy_pieces<kRows, Shape::kDim / 8, kThreads>([&](int row, int i) { return q_tile + Place::at(row, i * 8); },
                                                [&](int row, int i) { return queries + row * p.q.of_inner + i * 8; },
                                                s.queries - tile.row0);
  copy(begin);  // and q, in one group

  WarpRows<Shape> warp;
  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows, row = tile.row0 + warp_row;
  T* q = q_tile + warp_row * Place::kStride;
  for (int key = begin; key < end; key += kKeys) {
    cp_async_wait<0>();  //@ bytes_arrived
    __syncthreads();  // the bytes have arrived, and all have multiplied the previous tiles  //@ tiles_multiplied
    widen_tile<Place, kKeys, Shape::kDim, kThreads>(k_tile, k_bytes);
    widen_tile<PlaceV, kKeys, Shape::kDimV, kThreads>(v_tile, v_bytes);
    __syncthreads();  // the tiles are whole, and all have read the bytes  //@ bytes_widened
    copy(key + kKeys);
    if (key == begin) warp.keep_q(q);
    const int position = anew(row + s.keys - s.queries);
    const Span top = p.span_at(position, s.keys), bottom = p.span_at(position + Shape::kWarpRows - 1, s.keys);
    if (key >= bottom.end || key + kKeys <= top.begin) continue;  // the warp sees none of these keys
    warp.multiply_q_k(q, k_tile);
    const float factor = warp.cap(p);
    if (key < bottom.begin || key + kKeys > top.end) warp.mask(p, position, s.keys, key);
    warp.softmax(factor);
    warp.multiply_p_v(v_tile);
  }
  cp_async_wait<0>();
  // `store` overwrites the tile of q. Where no key is seen, no iteration has waited until all threads' copies of q have
  // arrived.
  if (begin >= end) __syncthreads();
  const float of_v[2] = {p.scales[1], p.scales[1]};
#pragma unroll
  for (auto& sums : warp.sums) scale_rows(sums, of_v);  //@ scale_of_v
  warp.store(p, tile, row, head, q);
}

template <typename Shape, typename P>
void launch_fp8(const P& p) {
  static_assert(kBytesOf<Shape> <= kMostShared);
  allow_shared(attend_fp8<Shape, P>, kBytesOf<Shape>);
  attend_fp8<Shape, P><<<query_tiles<Shape::kRows>(p), Shape::kThreads, kBytesOf<Shape>, p.stream>>>(p);
}

template <typename P>
void launch_dim(const P& p) {
  using T = typename P::Element;
  check_rows_in_pieces(p.out, p.v_dim, "prefill_attention: out"), check_rows_in_pieces(p.q, p.dim, "prefill_attention: q");
  check_rows_in_pieces(p.k, p.dim, "prefill_attention: k"), check_rows_in_pieces(p.v, p.v_dim, "prefill_attention: v");
  // The shapes of v03, but a tile has half the keys where the bytes leave no room for as many blocks.
  constexpr bool kLarge = kMostShared >= 144 << 10;
  if (p.dim == 64) return launch_fp8<Shape<T, 64, 4, 32, 64, 2>>(p);
  if (p.dim == 96) return launch_fp8<Shape<T, 96, 4, 32, kLarge ? 64 : 32, 2>>(p);
  if (p.dim == 192 && p.v_dim == 128) return launch_fp8<Shape<T, 192, 8, 16, kLarge ? 64 : 32, 1, 128>>(p);
  if (p.dim == 192) return launch_fp8<Shape<T, 192, 4, 16, 32, 2>>(p);
  if (p.dim == 256) return launch_fp8<Shape<T, 256, 4, 16, 32, 2>>(p);
  if constexpr (kLarge) launch_fp8<Shape<T, 128, 4, 32, 64, 2>>(p);
  else launch_fp8<Shape<T, 128, 8, 16, 64, 1>>(p);
}

}  // namespace minfer

MINFER_FP8_PREFILL_ATTENTION(prefill_attention_v12_fp8, minfer::launch_dim)
