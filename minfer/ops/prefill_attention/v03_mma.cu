// v03_mma: both products on tensor cores by mma.sync, in the scheme of FlashAttention-2 (Dao, 2023).
// Idea: a warp has whole rows of queries, so that a softmax takes no shared memory: scores stay in registers, become
// exponentials there, and are the left operand of the product with v in the same registers. cp.async loads tiles of k and v,
// swizzled: v during q kᵀ, the next k during p v. Tiles that no row of a block, or of a warp, sees are skipped, and only those
// on an edge of the mask are masked.
// Expected: FlashAttention-2's 320 TFLOP/s on an H200 and some percent more where the diagonal counts; its mma.sync reaches 636
// there, but softmax and products take turns in a warp, and two warps for each scheduler hide only a part of that. On sm_89
// near the roof of mma.sync (a probe must show whether fp32 sums have half the rate there).
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=16384, seq_kv=16384, heads=32, kv_heads=32, head_dim=128): 321.1
//   TFLOP/s cold; 53.0 % of torch.
#include "mma_attention.cuh"

MINFER_PREFILL_ATTENTION(prefill_attention_v03_mma, minfer::launch)
