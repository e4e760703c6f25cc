// v07_short: for many short sequences: a tile takes less time besides its products, and fewer products are of hidden pairs.
// Idea: five changes to v06, whose tiles of 128 queries take, besides their steps, the time of three steps more. (1) The two
// warpgroups do not take turns. Each has its own queries and its own position in the ring of keys, and ends on its own: one
// stores a tile while the other multiplies the next. (2) The rows of a tile are the queries of several heads that share keys,
// for example 16 queries of 8 heads: keys are read once for all of them, and a sequence of 20 tokens fills a tile. (3) Blocks
// have 64 keys, and a warpgroup multiplies only those that its own 64 rows see: at 512 tokens, causal, 1/9 of the products are
// of hidden pairs, and 1/5 in v06. (4) Queries are in registers: from shared memory, a product with 64 keys would read 128
// bytes a cycle, which is all that it delivers. That leaves room for five stages of keys and five of values, and the copies for
// the next tile begin a whole tile ahead. (5) A warp of its own takes tiles, so that no copy waits for the counter.
// Expected: 8 x 512 causal with 8 key-value heads reads and writes 84 MB, which takes 28 us at an H100's 3 TB/s. v06 takes 66
// us, 45 % of it in its steps. If the steps of the other warpgroup hide the rest: 40 us, 430 TFLOP/s.
// Measured (H200, bfloat16, padded, full, no, batch=6, seq_q=64, seq_kv=16384, heads=32, kv_heads=8, head_dim=128): 466.3
//   TFLOP/s cold; 157.4 % of torch.
#include "short_kernel.cuh"

MINFER_PREFILL_ATTENTION(prefill_attention_v07_short, minfer::launch)
