// v03_early: v02_vectors, begun before the previous launch has ended; the next one may begin before it has ended.
// Idea: in a decode step each launch has a microsecond of work and as much again of starting. Hopper starts the blocks of such a
// launch while the previous one ends, and they wait on the device.
// Expected: a microsecond less than v02 in a graph of a step; nothing where a call stands alone.
#include "heads.cuh"

namespace minfer {

template <typename T>
void launch(const RopeAppend<T>& p) {
  require_vectors(p);
  if (p.tokens <= 2 * multiprocessors()) launch_heads<Vector<T>, 1, true>(p);
  else launch_heads<Vector<T>, kManyHeads, true>(p);
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_v03_early, minfer::launch)
