// v08_compact: v07's tiles for sequences so short that a cold launch mostly waits for its own code.
// Idea: at 32 x 128, 13 of v07's 44 us pass before its first tile is stored. Code that was not yet executed comes from memory,
// and the first copies wait for it, too. So this kernel has little code: one loop, in which a block's scores, softmax and
// product with values follow each other, and one softmax for first blocks and others, with a mask and without. They no longer
// overlap within a warpgroup, but those of two warpgroups do. Besides, queries, keys and values share one ring of stages in the
// order of their use; and a warp hands a tile over before it draws the next one, whose number takes a microsecond to come.
// Expected: 5 us less than v07 at 32 x 128 and shorter; slower than v07 where a tile has many blocks of keys.
#include "ring_rows.cuh"

namespace minfer {

template <typename T>
void launch(const Attention<T>& p, const float* sinks = nullptr) {
  launch_ring<2>(p, sinks);
}

}  // namespace minfer

// What `minfer.attention` calls for heads with sinks, which the op does not have.
static void prefill_attention_v08_compact_sinks(minfer::Tensor out, minfer::Tensor lse, const minfer::Tensor q,
                                              const minfer::Tensor k, const minfer::Tensor v, const minfer::Tensor q_seqlens,
                                              const minfer::Tensor kv_seqlens, const minfer::Tensor sinks, bool causal,
                                              int64_t window, double softcap, double scale) {
  minfer::check_sizes(sinks, "prefill_attention: sinks", {q.size(q.dim() - 2)});
  minfer::check_contiguous(sinks, "prefill_attention: sinks");
  const float* of_heads = minfer::input<float>(sinks, "prefill_attention: sinks");
  minfer::dispatch(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap, scale,
                   [&](const auto& p) { minfer::launch(p, of_heads); });
}
MINFER_OP(prefill_attention_v08_compact_sinks,
          "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor q_seqlens, Tensor kv_seqlens, Tensor sinks, "
          "bool causal=True, int window=0, float softcap=0.0, float scale=0.0) -> ()")
MINFER_PREFILL_ATTENTION(prefill_attention_v08_compact, minfer::launch)
