// v15_gathered: v06 over keys and values in pages of any power of two, which another kernel copies first.
// Idea: v10's boxes of a page each take longer than v06's of 128 keys, and pages of under 8 slots have no boxes at all. But
// many queries read the same keys, so it is enough to look up a page once. One kernel copies the keys and values of each
// sequence to scratch memory, side by side, but no key behind a sequence's length, and none that a window hides from all of its
// queries. v06's kernel reads the copy. It starts when the last blocks of the first one run; the thread that copies to shared
// memory waits for their end. For few queries over many keys, v14's kernels read the copy, with keys in parts.
// Expected: 440 us with 512 queries over 32768 keys (32 heads and 8 key-value heads of 128), for pages of any size. v06 takes
// 347 us, and the copy moves 268 MB, which takes 90 us. v10 takes 513 us with pages of 16, v09 some 2200.
// With keys in parts: 52 us with 9 queries over 50351 keys (8/1 heads of 128). v14's kernels take 35 us (v18_paged_parts), and
// the copy moves 52 MB; with v06's kernel it took 486 us.
// Measured (H200, bfloat16, packed, full, no, 16, batch=1, seq_q=512, seq_kv=32768, heads=32, kv_heads=8, head_dim=128): 656.8
//   TFLOP/s cold; 262.3 % of torch.
#include "gathered.cuh"

MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_v15_gathered, minfer::launch_gathered)
