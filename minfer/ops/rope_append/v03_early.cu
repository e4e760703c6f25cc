// v03_early: v02_vectors for a decoder's step, with a launch that begins while the previous one still runs.
// Idea: rope_append lies between the product that makes qkv and attention. Its blocks start before that product has ended, wait
// for it, and let those of attention start (programmatic dependent launch).
// Expected (H100, in a step of Llama 3.1 8B at batch 1): 1 us less for each layer.
#include "heads.cuh"

namespace minfer {

template <typename T>
void launch(const RopeAppend<T>& p) {
  require_vectors(p);
  launch_heads<Vector<T>, 1, true>(p);
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_v03_early, minfer::launch)
