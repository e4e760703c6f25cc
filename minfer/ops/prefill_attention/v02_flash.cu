// v02_flash: one kernel that never writes a score to memory: online softmax over tiles of keys in shared memory, fp32
// FMA.
// Idea: a block has 32 queries, eight threads for each, and goes over 32 keys at a time: scores, their exponentials relative
// to the largest score so far, and their product with v, whose sums are scaled when the largest grows (Dao et al.,
// FlashAttention, 2022).
// Expected: ten times v01_naive or more, which reads q, k and v again for each score. Then the loads from shared memory are the
// limit, two for two multiply-adds in q kᵀ: far below the 60 TFLOP/s of an H200's fp32 FMA, and not memory.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=8192, seq_kv=8192, heads=32, kv_heads=32, head_dim=128): 13.72
//   TFLOP/s cold; 2.26 % of torch.
#include "cuda/shared_tile.cuh"
#include "cuda/softmax.cuh"
#include "query_tile.cuh"

namespace minfer {

constexpr int kRows = 32, kKeys = 32, kOfRow = 8, kThreads = kRows * kOfRow;

// Shared memory: rows of q, k and v, each padded by a pair, so that one column of eight rows is in eight banks.
template <typename T, int kDim, int kDimV>
struct Tiles {
  T q[kRows][kDim + 2], k[kKeys][kDim + 2], v[kKeys][kDimV + 2];
  float p[kRows][kKeys + 1];
};

// Copies rows, of which those from `count` on are zero.
template <int kDim, typename T>
__device__ void copy(T (*to)[kDim + 2], const T* from, int64_t stride, int count) {
  for (int i = threadIdx.x; i < kRows * kDim / 2; i += kThreads) {
    const int row = i / (kDim / 2), col = i % (kDim / 2) * 2;
    *reinterpret_cast<uint32_t*>(&to[row][col]) =
        row < count ? *reinterpret_cast<const uint32_t*>(from + row * stride + col) : 0;
  }
}

template <typename T>
__device__ float2 pair_at(const T* p) {
  return to_floats(*reinterpret_cast<const typename Vector<T>::Pair*>(p));
}

// Over the eight threads of a row.
template <typename Combine>
__device__ float of_row(float x, Combine combine) {
#pragma unroll
  for (int mask = 1; mask < kOfRow; mask *= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, mask));
  return x;
}

template <typename T, int kDim, int kDimV>
__global__ void __launch_bounds__(kThreads) attend(Attention<T> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& tiles = *reinterpret_cast<Tiles<T, kDim, kDimV>*>(shared);
  const QueryTile tile = query_tile<kRows>(p);
  if (tile.number < 0) return;
  const Sequence s = tile.s;
  const int head = blockIdx.y, kv_head = p.kv_head(head), of = threadIdx.x % kOfRow, row = threadIdx.x / kOfRow;
  const int query = tile.row0 + row, last = min(tile.row0 + kRows, s.queries) - 1;
  const Span span = query < s.queries ? p.span(s, query) : Span{0, 0};
  const int begin = p.span(s, tile.row0).begin, end = last >= tile.row0 ? p.span(s, last).end : 0;
  copy<kDim>(tiles.q, p.q.at(tile.number, s.first_q + tile.row0, head), p.q.of_inner, s.queries - tile.row0);

  float max = -INFINITY, total = 0.0f, sums[kDimV / kOfRow] = {};  // of the columns 2 of + 16 i and the next
  for (int key0 = begin; key0 < end; key0 += kKeys) {
    __syncthreads();  // all are done with the previous tiles  //@ refill
    copy<kDim>(tiles.k, p.k.at(tile.number, s.first_kv + key0, kv_head), p.k.of_inner, end - key0);
    copy<kDimV>(tiles.v, p.v.at(tile.number, s.first_kv + key0, kv_head), p.v.of_inner, end - key0);
    __syncthreads();

    float scores[kKeys / kOfRow] = {}, highest = max;
#pragma unroll 4
    for (int col = 0; col < kDim; col += 2) {
      const float2 q = pair_at(&tiles.q[row][col]);
#pragma unroll
      for (int i = 0; i < kKeys / kOfRow; ++i) {
        const float2 k = pair_at(&tiles.k[of + i * kOfRow][col]);
        scores[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, scores[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / kOfRow; ++i) {
      const int key = key0 + of + i * kOfRow;
      scores[i] *= p.scale;
      if (p.softcap > 0.0f) scores[i] = p.softcap * tanh_by_exp2(scores[i] / p.softcap);
      if (key < span.begin || key >= span.end) scores[i] = -INFINITY;
      highest = fmaxf(highest, scores[i]);
    }
    highest = of_row(highest, Max());
    const float base = base_of_row(highest), rescale = exp2_approx((max - base) * kLog2E);
    max = highest, total *= rescale;
#pragma unroll
    for (int i = 0; i < kKeys / kOfRow; ++i) {
      scores[i] = exp2_approx((scores[i] - base) * kLog2E);
      total += scores[i];
      tiles.p[row][of + i * kOfRow] = scores[i];
    }
    __syncwarp();  // the threads of a row are in one warp

#pragma unroll
    for (int i = 0; i < kDimV / kOfRow; ++i) sums[i] *= rescale;  //@ rescale
    for (int key = 0; key < kKeys; ++key) {
      const float power = tiles.p[row][key];
#pragma unroll
      for (int i = 0; i < kDimV / kOfRow; i += 2) {
        const float2 v = pair_at(&tiles.v[key][of * 2 + i * kOfRow]);
        sums[i] = fmaf(power, v.x, sums[i]), sums[i + 1] = fmaf(power, v.y, sums[i + 1]);
      }
    }
  }

  total = of_row(total, Sum());
  if (query >= p.rows(s)) return;
  const bool seen = max != -INFINITY;
  const float inverse = seen ? 1.0f / total : 0.0f;
  T* out = p.out.at(tile.number, s.first_q + query, head);
#pragma unroll
  for (int i = 0; i < kDimV / kOfRow; ++i) out[of * 2 + i / 2 * 2 * kOfRow + i % 2] = T(sums[i] * inverse);
  if (p.lse && of == 0) *p.lse_at(tile.number, s, query, head) = seen ? max + logf(total) : -INFINITY;
}

template <int kDim, int kDimV = kDim, typename T>
void launch_dim(const Attention<T>& p) {
  using Tiles = Tiles<T, kDim, kDimV>;
  allow_shared(attend<T, kDim, kDimV>, sizeof(Tiles));
  attend<T, kDim, kDimV><<<query_tiles<kRows>(p), kThreads, sizeof(Tiles), p.stream>>>(p);
}

template <typename T>
void launch(const Attention<T>& p) {
  require_vectors(p);  // pairs of elements would do, but no caller has less than vectors
  if (p.dim == 64) return launch_dim<64>(p);
  if (p.dim == 96) return launch_dim<96>(p);
  if (p.dim == 128) return launch_dim<128>(p);
  if (p.dim == 192) {  // with values of 192, ptxas spills for sm_89
    STD_TORCH_CHECK(p.v_dim == 128, "prefill_attention: with a head_dim of 192 this kernel needs v with 128, got ", p.v_dim);
    return launch_dim<192, 128>(p);
  }
  launch_dim<256>(p);
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v02_flash, minfer::launch)
