// v18_paged_parts: v11 with keys in parts, for few queries over many keys in pages of at least 8 slots.
// Idea: v14's two kernels, whose parts are copied as v11 copies items: a lane for each box of a page. The host knows how many
// keys the page table has room for, and chooses the most parts from that. The GPU, which knows the lengths, divides the keys
// that there are. Where whole items take no longer, v11's kernel is launched.
// Expected: 1 x 9 queries x 50351 keys, 8/1 heads of 128, pages of 16, are one item. On an H200 v11 takes 1037 us for its 787
// blocks of keys, 1.3 us each. In 64 parts at most 13 blocks follow each other: 17 us, and 17 for the first copies, the stores
// and the second kernel, as in v14. The 26 MB of keys and values would take 6 us. So 35 us; v15 takes 486.
// Measured (H200, bfloat16, padded, full, no, 16, batch=6, seq_q=64, seq_kv=16384, heads=32, kv_heads=8, head_dim=128): 382.4
//   TFLOP/s cold; 681.2 % of torch.
#include "page_items.cuh"
#include "parts_kernel.cuh"

namespace minfer {

// What copies keys and values in pages: a warp.
struct CopyByWarp {
  static constexpr bool kStartsEarly = false;
  int log_box;

  template <typename Tile, typename T>
  __device__ void operator()(const Tile& tile, const PagedAttention<T>& p, const AttentionMaps& maps, int log_packed) const {
    if (threadIdx.x / 32 == kWarpgroups * 4) copy_boxes(tile, p, maps, log_packed, log_box);
  }
};

template <typename T>
void launch_parts(const PagedAttention<T>& p) {
  STD_TORCH_CHECK(p.dim == 64 || p.dim == 128, "prefill_attention: this kernel takes heads of 64 and 128, got ", p.dim);
  const Division division = divide_keys(p);
  if (division.most == 1) return launch(p);
  const int log_box = find_log_box<kKeys>(p);
  if (p.dim == 64) launch_divided<64>(p, division, 1 << log_box, CopyByWarp{log_box});
  else launch_divided<128>(p, division, 1 << log_box, CopyByWarp{log_box});
}

}  // namespace minfer

MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_v18_paged_parts, minfer::launch_parts)
