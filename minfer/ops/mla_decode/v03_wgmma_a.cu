// v03_wgmma_a: v03_wgmma, where both warpgroups do the other's product first with more than 64 query rows, and not
// with fewer.
// Idea: the other choice of the order, to be timed.
#include "hopper_blocks.cuh"

namespace minfer {

template <typename T>
void launch(const Mla<T>& p) {
  require_vectors(p);
  // With one tile of query rows memory is the limit, with more of them the tensor cores are.
  if (p.rows() <= kRows) launch_blocks<Order::kProducts>(p);
  else launch_blocks<Order::kSeesaw>(p);
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v03_wgmma_a, minfer::launch)
