// v02_vectors: 16-byte loads and stores of q, k and v, each of which is read once and written once, in one launch.
// Idea: rope and kv_append read and write k twice, and a decode step waits for two launches with 1 us of work each. Here a
// thread has one vector of each half of its heads, whether they are of q, of k or of v. It asks for its heads, its position and
// its place at once, and then for the angles, so it waits for memory twice. A norm needs the sum over a head. That takes a few
// shuffles, because the threads of a head are neighbours.
// Expected: near the copy's speed for many tokens: 16384 tokens of 48 heads of 128 in float16 are 403 MB and 8 MB of angles,
// 96 us at an H200's 4.28 TB/s. Two launches move 536 MB. For few tokens a launch and two waits, 3 us; two launches take 5 us.
// Measured (H100 80GB HBM3, bfloat16, none, none, tokens=16384, heads=32, kv_heads=8, head_dim=128, rotary_dim=128): 2952 GB/s
//   cold, 2911 steady; 1413 % and 1367 % of torch.
#include "heads.cuh"

namespace minfer {

template <typename T>
void launch(const RopeAppend<T>& p) {
  require_vectors(p);
  // With few tokens no SM has enough to do, and a thread should have as little as possible.
  if (p.tokens <= 2 * multiprocessors()) launch_heads<Vector<T>, 1>(p);
  else launch_heads<Vector<T>, kManyHeads>(p);
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_v02_vectors, minfer::launch)
