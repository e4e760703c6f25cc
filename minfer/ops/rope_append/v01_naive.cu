// v01_naive: one element of each half a thread, for heads of any size.
// Idea: the definition, with the threads of a head next to each other, so that neighbours read neighbours.
// Expected: a fraction of the copy's speed for many tokens, because a thread has 2 or 4 bytes under way where it could have 32.
#include "heads.cuh"

namespace minfer {

template <typename T>
void launch(const RopeAppend<T>& p) {
  launch_heads<Element<T>, 1>(p);
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_v01_naive, minfer::launch)
