// v11_paged_short: v07 over keys and values in pages of at least 8 slots.
// Idea: that of v10, in blocks of 64 keys: a lane for each box of a page. A lane's boxes of k and of v of a block are started at
// different times, so a lane reads the table once for a block of k, a block ahead, and keeps the place for v.
// Expected: the time of v07 with pages of 16. Each tile waits once for the page table before its first keys; the copies for a
// tile begin a whole tile ahead, so only a block's first tile shows this wait.
// Measured (H200, bfloat16, packed, full, no, 16, batch=1, seq_q=2048, seq_kv=32768, heads=32, kv_heads=8, head_dim=128): 461.2
//   TFLOP/s cold; 136.1 % of torch.
#include "page_items.cuh"

MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_v11_paged_short, minfer::launch)
