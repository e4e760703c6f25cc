// v09_paged: v03 over keys and values in pages of any power of two, of head_dims and on GPUs that the kernels with TMA lack.
// Idea: cp.async copies 16 bytes from anywhere, so only the address of a row changes. The numbers of a tile's pages are copied
// to shared memory by cp.async, too, a tile ahead: nothing waits for the table, and no register holds what was read there.
// Expected: the time of v03 and up to 5 %: each copy of 16 bytes takes a load of its page's number from shared memory and two
// multiplications for its address, beside the eight products of 16 x 8 x 16 that use it.
// Measured (H200, bfloat16, packed, full, no, 16, batch=1, seq_q=2048, seq_kv=32768, heads=32, kv_heads=8, head_dim=128): 250.5
//   TFLOP/s cold; 73.9 % of torch.
#include "mma_attention.cuh"

MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_v09_paged, minfer::launch)
