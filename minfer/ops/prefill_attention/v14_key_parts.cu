// v14_key_parts: v07 with keys in parts, for few queries over many keys, whose items leave multiprocessors idle.
// Idea: an item's blocks of keys are divided into parts, which thread blocks take as items (Flash-Decoding, Dao et al., 2023).
// A part leaves its sums in memory in fp32, not divided, with the base and the sum of its exponentials. A second kernel adds up
// the parts of each row in their order, and rounds once. So the bits do not depend on who takes a part. The host chooses how
// many parts an item has at most, from the shape (key_parts.h). The GPU, which knows the lengths, divides the keys that the
// item's own rows see. Where whole items take no longer, v07's kernel is launched.
// Expected: 1 x 47 queries x 55343 keys, causal, 32/8 heads of 128, has 16 items. On an H200 each has 8 parts of 109 blocks of
// keys. The 226 MB of keys and values would take 53 us at 4.3 TB/s. But by the model of v07's times (attention_times.py) both
// warpgroups take 1.1 us for a block: 120 us, and 17 for the first copies, the stores and the second kernel. 137 us; v06 takes
// 533, and FlashAttention-2, which divides keys, 220. 1 x 110 x 29456 with 16/8 heads: 80 us, against 295 and 112.
// Measured (H200, bfloat16, padded, full, no, batch=6, seq_q=64, seq_kv=16384, heads=32, kv_heads=8, head_dim=128): 507.0
//   TFLOP/s cold; 171.1 % of torch.
#include "parts_kernel.cuh"
#include "short_kernel.cuh"

namespace minfer {

template <typename T>
void launch_parts(const Attention<T>& p) {
  STD_TORCH_CHECK(p.dim == 64 || p.dim == 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const Division division = divide_keys(p);
  if (division.most == 1) return launch(p);
  if (p.dim == 64) launch_divided<64>(p, division, kKeys, CopyByThread{});
  else launch_divided<128>(p, division, kKeys, CopyByThread{});
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v14_key_parts, minfer::launch_parts)
