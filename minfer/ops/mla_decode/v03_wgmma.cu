// v03_wgmma: Hopper's copy engine and warpgroup products: 64 query rows a block, and each row of the cache is loaded once, as
// a key and as a value.
// Idea: out of 64 rows is 64 x 512 in fp32, half of an SM's registers, so that two warpgroups have 256 columns each. 64 rows
// of the cache are a stage of 72 KB, q is 72 KB, and 227 KB take two stages. The warpgroups take blocks of keys in turn: one
// computes scores and softmax of a block while the other one multiplies, and the exponentials pass through the stage itself.
// Most blocks need no maximum: as in prefill_attention's v06, the base stays while the exponentials do not add up to too much.
// Each launch divides the work equally among the blocks, on the device, as decode_attention's v04_balanced does. All blocks run
// at once, so those with parts of one item divide the rows among them and add up the parts in their order, when all are there.
// Expected: for 64 x 64 scores the tensor cores take 1152 cycles, for out 1024, and the softmax takes 700. Half of the scores
// run under the other warpgroup's softmax, so that a block of keys takes 2600 to 2950 cycles, depending on how soon copies
// come: with 128 heads 600 to 640 TFLOP/s. With 64 heads memory is the limit, at 0.85 of its speed.
// Measured (H200, bfloat16, 64, full, batch=16, new=1, longest=16384, heads=128): 576.6 TFLOP/s cold; 1354 % of torch.
#include "hopper_blocks.cuh"

namespace minfer {

template <typename T>
void launch(const Mla<T>& p) {
  require_vectors(p);
  launch_blocks(p);
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v03_wgmma, minfer::launch)
