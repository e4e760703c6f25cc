// v13_wide_heads: heads of 192 and 256, and of 192 with values of 128. Blocks have 128 keys. A warpgroup's softmax runs during
// the other one's products, and not during its own.
// Idea: v05 has blocks of 64 keys for these heads. Its scores then read q and k at 128 bytes a cycle, all that shared memory
// delivers, and the copies come on top. Five changes to v05. (1) Blocks of 128 keys: a product reads a row of q for twice as
// many keys, and shared memory is busy for 7/8 of the time of the products. (2) 64 x 128 scores beside 64 x 256 sums leave no
// registers for the exponentials of another block. So a warpgroup's softmax overlaps the products of the other one only, which
// take twice as long: in its turn, a warpgroup adds p v of a block to out and computes the scores of the next. (3) Two blocks
// of keys and two of values do not fit beside q. So keys and values come in a ring of pieces: 64 columns of 128 keys, or 32
// whole rows of values. The products with a piece take 256 cycles (with heads of 256). The piece is given back when they are
// done, while those with the next piece run. (4) A warp writes its 16 rows of out over its 16 rows of q, from where TMA stores
// them; then it copies q of the next tile. (5) v06's order of tiles, and its loop without masks.
// Expected (H200, 1 x 8192, causal): the tensor cores idle only at the ends of tiles, 2500 of 133000 cycles. Products alone
// reach 800 TFLOP/s; less what the clock loses under this load, 700.
// Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=8192, seq_kv=8192, heads=16, kv_heads=16, head_dim=256): 786.0
//   TFLOP/s cold; 124.5 % of torch.
#include "wide_kernel.cuh"

MINFER_PREFILL_ATTENTION(prefill_attention_v13_wide_heads, minfer::launch)
