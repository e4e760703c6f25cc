// v16_fp8_gathered: v06 over keys and values in fp8, side by side or in pages of any power of two, which another kernel widens
// first.
// Idea: v15's two kernels. The first one widens the numbers to q's dtype, which is exact, and does not multiply them by the
// scales. The scale of keys is a part of the scale of scores, and the sums are multiplied once by that of values. So wgmma
// multiplies as in v06, and each number is widened once for all queries. For few queries over many keys, v14's kernels read the
// copy, with keys in parts. Weights that are far apart are then applied as their roots, twice, as v06's are.
// Expected: 410 us with 512 queries over 32768 keys (32 heads and 8 key-value heads of 128). v06 takes 347 us, and the first
// kernel moves 200 MB, which takes 67 us. v12 takes 2061 us. With keys in parts: 35 us with 16 queries over 17210
// keys (8/1 heads of 128), of which some 10 are the copy's; with v06's kernel it took 178 us.
// Measured (H200, bfloat16, packed, full, no, 16, fp8, batch=1, seq_q=512, seq_kv=32768, heads=32, kv_heads=8, head_dim=128):
//   710.1 TFLOP/s cold; 390.5 % of torch.
#include "gathered.cuh"

MINFER_FP8_PREFILL_ATTENTION(prefill_attention_v16_fp8_gathered, minfer::launch_gathered)
