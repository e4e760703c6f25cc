// Attention by mma.sync for v03_mma and v09_paged: a block goes over the keys of a tile of queries.
#pragma once

#include "cuda/shared_tile.cuh"
#include "cuda/softmax.cuh"
#include "query_tile.cuh"

namespace minfer {

// Where an element of a tile of 96 columns lies: as `Swizzled` has it, whose order of pieces repeats after 128 bytes. A row is
// 192 bytes here, so that two rows begin in different halves of the banks, and the order changes within four pieces.
struct Swizzled96 {
  static constexpr int kStride = 96;
  __device__ static int at(int row, int col) { return row * kStride + ((col / 8) ^ (row / 2 % 4)) * 8 + col % 8; }
};
template <int kCols>
using PlaceOf = std::conditional_t<kCols == 96, Swizzled96, Swizzled<kCols>>;

// `copy_rows`, also of rows whose 12 or 24 pieces do not divide the threads of a block: then four or eight threads copy a row.
template <typename Place, int kRows, int kCols, int kThreads, typename T>
__device__ inline void copy_tile(T* tile, const T* rows, int64_t stride, int rows_left) {
  if constexpr (kThreads % (kCols / 8) == 0) {
    copy_rows<Place, kRows, kCols, kThreads>(tile, rows, stride, rows_left);
  } else {
    constexpr int kOfRow = kCols % 64 == 0 ? 8 : 4, kRowStep = kThreads / kOfRow;
    static_assert(kCols % (kOfRow * 8) == 0 && kRows % kRowStep == 0);
    const int row = threadIdx.x / kOfRow, col = threadIdx.x % kOfRow * 8;
    const T* from = rows + row * stride + col;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowStep)
#pragma unroll
      for (int n = 0; n < kCols; n += kOfRow * 8)
        cp_async_16(tile + Place::at(row + i, n + col), from + i * stride + n, row + i < rows_left);  //@ part_of_row
  }
}

// The same of rows that lie anywhere: `row_at(i)` is where row i begins, of those that are read.
template <typename Place, int kRows, int kCols, int kThreads, typename T, typename RowAt>
__device__ inline void copy_rows_at(T* tile, RowAt row_at, int rows_left) {
  constexpr int kPieces = kCols / 8, kOfRow = kThreads % kPieces == 0 ? kPieces : kCols % 64 == 0 ? 8 : 4;
  constexpr int kRowStep = kThreads / kOfRow;
  static_assert(kCols % (kOfRow * 8) == 0 && kRows % kRowStep == 0);
  const int row = threadIdx.x / kOfRow, col = threadIdx.x % kOfRow * 8;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowStep) {
    const T* from = row_at(row + i) + col;
#pragma unroll
    for (int n = 0; n < kCols; n += kOfRow * 8)
      cp_async_16(tile + Place::at(row + i, n + col), from + n, row + i < rows_left);
  }
}

// Each of kWarps warps has kWarpRows queries, and the block goes over kKeys keys at a time. A larger kWarpRows multiplies each
// loaded fragment of k or v with more rows, but takes more sums in each thread: kWarpRows * kDimV / 32.
template <typename T_, int kDim_, int kWarps, int kWarpRows_, int kKeys_, int kResident_, int kDimV_ = kDim_>
struct Shape {
  using T = T_;
  using Place = PlaceOf<kDim_>;    // of elements of q and k
  using PlaceV = PlaceOf<kDimV_>;  // of v and out
  static constexpr int kDim = kDim_, kDimV = kDimV_, kWarpRows = kWarpRows_, kKeys = kKeys_, kResident = kResident_;
  static constexpr int kThreads = 32 * kWarps, kRows = kWarps * kWarpRows, kSlabs = kWarpRows / 16;
  static constexpr int kQ = kRows * kDim, kK = kKeys * kDim, kV = kKeys * kDimV;  // elements of the tiles
  static constexpr int kBytes = (kQ + kK + kV) * sizeof(T);
  // Keeps q in registers, 4 for each 16 x 16 of it.
  static constexpr bool kKeepsQ = kSlabs * kDim <= 128 || (kSlabs == 1 && kDim + kDimV <= 320);
  static_assert(kDimV <= kDim, "out is stored through the tile of q");
  static_assert(kBytes <= kMostShared);
};

// 16 x 8 of a product, of the accumulators of 16 rows.
template <int kCount>
__device__ inline float (&quad(float (&sums)[kCount], int column8))[4] {
  return reinterpret_cast<float(&)[4]>(sums[4 * column8]);
}

// A warp's rows: their fragments of q, their sums, and the softmax of what they have seen.
template <typename Shape>
struct WarpRows {
  using T = typename Shape::T;
  using Place = typename Shape::Place;
  using PlaceV = typename Shape::PlaceV;
  static constexpr int kSlabs = Shape::kSlabs, kDim = Shape::kDim, kDimV = Shape::kDimV, kKeys = Shape::kKeys;

  uint32_t kept[Shape::kKeepsQ ? kDim / 16 : 1][kSlabs][4];  // of q
  float scores[kSlabs][kKeys / 2];
  float sums[kSlabs][kDimV / 2] = {};
  OnlineRows online[kSlabs];

  __device__ static void load_q(uint32_t (&a)[kSlabs][4], const T* q, int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) ldmatrix_x4(a[i], q + Place::at(16 * i + lane % 16, 16 * step + lane / 16 * 8));
  }

  // q is the tile from this warp's first row on.
  __device__ void keep_q(const T* q) {
    if constexpr (Shape::kKeepsQ)
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) load_q(kept[step], q, step);
  }

  __device__ void multiply_q_k(const T* q, const T* k) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int n = 0; n < kKeys / 2; ++n) scores[i][n] = 0.0f;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t loaded[kSlabs][4];
      if constexpr (!Shape::kKeepsQ) load_q(loaded, q, step);
      auto& a = Shape::kKeepsQ ? kept[Shape::kKeepsQ ? step : 0] : loaded;
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];  // 16 keys
        ldmatrix_x4(b, k + Place::at(16 * j + lane / 16 * 8 + lane % 8, 16 * step + lane / 8 % 2 * 8));
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          mma_m16n8k16<T>(quad(scores[i], 2 * j), a[i], first);
          mma_m16n8k16<T>(quad(scores[i], 2 * j + 1), a[i], second);
        }
      }
    }
  }

  // sums += scores v, where the scores have become exponentials.
  __device__ void multiply_p_v(const T* v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[kSlabs][4];
#pragma unroll
      for (int i = 0; i < kSlabs; ++i) to_fragment<T>(a[i], scores[i], step);
#pragma unroll
      for (int j = 0; j < kDimV / 16; ++j) {
        uint32_t b[4];  // 16 columns
        ldmatrix_x4_trans(b, v + PlaceV::at(16 * step + lane % 16, 16 * j + lane / 16 * 8));
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          mma_m16n8k16<T>(quad(sums[i], 2 * j), a[i], first);
          mma_m16n8k16<T>(quad(sums[i], 2 * j + 1), a[i], second);
        }
      }
    }
  }

  // The scores of keys from `key` on that a row does not see become -inf; `position` is that of the warp's first.
  __device__ void mask(const Attention<T>& p, int position, int keys, int key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Span span = p.span_at(position + 16 * i + 8 * r + lane / 4, keys);
        const int begin = span.begin - key - lane % 4 * 2, end = span.end - key - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kKeys / 4; ++n) {  // two of each eight columns
          const int column = n / 2 * 8 + n % 2;
          if (column < begin || column >= end) scores[i][n / 2 * 4 + 2 * r + n % 2] = -INFINITY;
        }
      }
  }

  // A score times this is an exponent of 2; a soft cap is applied before.
  __device__ float cap(const Attention<T>& p) {
    if (p.softcap == 0.0f) return p.scale * kLog2E;
    const float inside = p.scale / p.softcap;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int n = 0; n < kKeys / 2; ++n) scores[i][n] = tanh_by_exp2(scores[i][n] * inside);
    return p.softcap * kLog2E;
  }

  __device__ void softmax(float factor) {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      float rescale[2];
      if (online[i].add(scores[i], factor, rescale)) scale_rows(sums[i], rescale);
    }
  }

  // Writes the warp's rows through their own place in q's tile, so that adjacent lanes write adjacent 16 bytes of a row. Rows
  // from `queries` on of a padded batch are zero.
  __device__ void store(const Attention<T>& p, const QueryTile& tile, int row, int head, T* q) {
    using Pair = typename Vector<T>::Pair;
    const int lane = threadIdx.x % 32, rows = p.rows(tile.s);
    const float factor = (p.softcap == 0.0f ? p.scale : p.softcap) * kLog2E;
    __syncwarp();  // all lanes have loaded their last fragments of q
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      float inverse[2], lse[2];
      online[i].finish(factor, inverse, lse);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = row + 16 * i + 8 * r + lane / 4;
        if (query >= tile.s.queries) inverse[r] = 0.0f, lse[r] = -INFINITY;
        if (p.lse && lane % 4 == 0 && query < rows) *p.lse_at(tile.number, tile.s, query, head) = lse[r];
      }
      scale_rows(sums[i], inverse);
#pragma unroll
      for (int n = 0; n < kDimV / 4; ++n) {
        const int at = PlaceV::at(16 * i + n % 2 * 8 + lane / 4, n / 2 * 8 + lane % 4 * 2);
        round_to(reinterpret_cast<Pair&>(q[at]), sums[i][2 * n], sums[i][2 * n + 1]);
      }
    }
    __syncwarp();
    constexpr int kPieces = kDimV / 8;
#pragma unroll
    for (int n = 0; n < Shape::kWarpRows * kPieces / 32; ++n) {
      const int of = (32 * n + lane) / kPieces, column = (32 * n + lane) % kPieces * 8;
      if (row + of < rows)
        *reinterpret_cast<uint4*>(p.out.at(tile.number, tile.s.first_q + row + of, head) + column) =
            *reinterpret_cast<const uint4*>(q + PlaceV::at(of, column));
    }
  }
};

// P is Attention<T> or PagedAttention<T>. The numbers of the pages of a tile of keys are copied to shared memory a tile ahead,
// with v; `pages` has those of two tiles in turn.
template <typename Shape, typename P>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident) attend(P p) {
  using T = typename Shape::T;
  using Place = typename Shape::Place;
  using PlaceV = typename Shape::PlaceV;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  extern __shared__ __align__(128) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T *k_tile = q_tile + Shape::kQ, *v_tile = k_tile + Shape::kK;
  __shared__ int pages[P::kPaged ? 2 * kKeys : 1];

  const QueryTile tile = query_tile<kRows>(p);
  if (tile.number < 0) return;
  const Sequence s = tile.s;
  const int head = blockIdx.y, kv_head = p.kv_head(head);
  const int last = min(tile.row0 + kRows, s.queries) - 1;
  const Span first_span = p.span(s, tile.row0), last_span = p.span(s, last);
  // Keys that any row sees, from a multiple of kKeys on; none where all rows lie behind the queries.
  const int begin = first_span.begin / kKeys * kKeys, end = last >= tile.row0 ? last_span.end : 0;

  // Starts copying the numbers of the pages of a tile of keys, for each key one.
  const auto pages_of = [&](int key) { return pages + key / kKeys % 2 * kKeys; };
  const auto look_up = [&](int first) {
    if constexpr (P::kPaged) {
      const int key = first + threadIdx.x;
      if (threadIdx.x < kKeys)
        cp_async_few<4>(pages_of(first) + threadIdx.x, p.entry_of(tile.number, key), key < end);  //@ last_page
    }
  };
  // Copies the rows of a tile of keys.
  const auto copy_paged = [&]<typename Place, int kCols>(T* to, const Rows<const T>& rows, int first) {
    if constexpr (P::kPaged) {
      const int* of_keys = pages_of(first);
      const auto row_at = [&](int row) {
        return p.at_place(rows, p.place_in(of_keys[row], first + row), kv_head);  //@ page_of_key
      };
      copy_rows_at<Place, kKeys, kCols, kThreads>(to, row_at, end - first);
    }
  };
  const T* k = P::kPaged ? nullptr : p.k.at(tile.number, s.first_kv, kv_head);
  const T* v = P::kPaged ? nullptr : p.v.at(tile.number, s.first_kv, kv_head);
  // Each starts a group of copies, an empty one too, so that the number of groups in flight is constant.
  const auto copy_k = [&](int key) {
    if (key < end) {
      if constexpr (P::kPaged) copy_paged.template operator()<Place, Shape::kDim>(k_tile, p.k, key);
      else copy_tile<Place, kKeys, Shape::kDim, kThreads>(k_tile, k + key * p.k.of_inner, p.k.of_inner, end - key);
    }
    cp_async_commit();
  };
  const auto copy_v = [&](int key) {
    if (key < end) {
      if constexpr (P::kPaged) copy_paged.template operator()<PlaceV, Shape::kDimV>(v_tile, p.v, key);
      else copy_tile<PlaceV, kKeys, Shape::kDimV, kThreads>(v_tile, v + key * p.v.of_inner, p.v.of_inner, end - key);
    }
    look_up(key + kKeys);
    cp_async_commit();
  };
  if constexpr (P::kPaged) {
    look_up(begin);
    cp_async_commit();
    cp_async_wait<0>();  //@ pages_arrived
    __syncthreads();
  }
  copy_tile<Place, kRows, Shape::kDim, kThreads>(q_tile, p.q.at(tile.number, s.first_q + tile.row0, head),
                                                 p.q.of_inner, s.queries - tile.row0);
  copy_k(begin);  // and q, in one group

  WarpRows<Shape> warp;
  const int warp_row = threadIdx.x / 32 * Shape::kWarpRows, row = tile.row0 + warp_row;
  T* q = q_tile + warp_row * Place::kStride;
  for (int key = begin; key < end; key += kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // k has arrived, and all have multiplied the previous v
    copy_v(key);
    if (key == begin) warp.keep_q(q);
    int position = row + s.keys - s.queries;
    asm volatile("" : "+r"(position));  // recomputing four bounds keeps no registers through the mainloop
    const Span top = p.span_at(position, s.keys), bottom = p.span_at(position + Shape::kWarpRows - 1, s.keys);
    const bool sees = key < bottom.end && key + kKeys > top.begin;
    if (sees) {
      warp.multiply_q_k(q, k_tile);
      const float factor = warp.cap(p);
      if (key < bottom.begin || key + kKeys > top.end) warp.mask(p, position, s.keys, key);  //@ mask_edge
      warp.softmax(factor);
    }
    cp_async_wait<0>();  //@ v_arrived
    __syncthreads();  // v has arrived, and all have multiplied k  //@ k_multiplied
    copy_k(key + kKeys);
    if (sees) warp.multiply_p_v(v_tile);
  }
  cp_async_wait<0>();
  // `store` overwrites the tile of q. Where no key is seen, no iteration has waited until all threads' copies of q have
  // arrived.
  if (begin >= end) __syncthreads();  //@ q_arrived
  warp.store(p, tile, row, head, q);
}

template <typename Shape, typename P>
void launch_shape(const P& p) {
  allow_shared(attend<Shape, P>, Shape::kBytes);
  attend<Shape, P><<<query_tiles<Shape::kRows>(p), Shape::kThreads, Shape::kBytes, p.stream>>>(p);
}

template <typename P>
void launch(const P& p) {
  using T = typename P::Element;
  require_vectors(p);
  if (p.dim == 64) return launch_shape<Shape<T, 64, 4, 32, 64, 2>>(p);
  if (p.dim == 96) return launch_shape<Shape<T, 96, 4, 32, 64, 2>>(p);
  if (p.dim == 192 && p.v_dim == 128) return launch_shape<Shape<T, 192, 8, 16, 64, 1, 128>>(p);  // 32 rows would spill
  if (p.dim == 192) return launch_shape<Shape<T, 192, 4, 16, 32, 2>>(p);
  if (p.dim == 256) return launch_shape<Shape<T, 256, 4, 16, 32, 2>>(p);
  // Where an SM has shared memory for two blocks, they have four warps of 32 rows, which load half as many fragments
  // for a product; where it has not, one block has eight warps, because four would leave each scheduler with one. Of keys in
  // pages a tile has half as many: 64 would spill.
  if constexpr (kMostShared >= 144 << 10) launch_shape<Shape<T, 128, 4, 32, P::kPaged ? 32 : 64, 2>>(p);
  else launch_shape<Shape<T, 128, 8, 16, 64, 1>>(p);
}

}  // namespace minfer
