// v03_one_wave: hgemm's v14: the smallest tiles that all run at once, with bias and ReLU before they leave.
// Idea: 1024x256x512 is over before anything is in full swing: what counts is how soon the first bytes are asked for and how
// little follows the last. 128 tiles of 64 x 32 (TN) are one wave of an H200, and all of a tile's k is in flight at once: 8
// stages of 12 KB. The biases are read while the first copies are under way.
// Expected: 1024x256x512 in 6 us: launch and first bytes 3, L2 to shared memory 1 (96 KB an SM), store and end 1.5; cuBLASLt
// takes 7.5 with tiles that leave most multiprocessors idle.
// Measured (H200, float16, TN, m=n=k=4096): 637.3 TFLOP/s cold; 95.4 % of torch.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biased_strips.cuh"

namespace minfer {

template <typename T, Layout kLayout, int kM, int kN, int kWarpgroups>
using Alone = Shape<T, kLayout, kM, kN, kWarpgroups, 1, 1, true>;

// With scopes, benchmarks/scopes.py and its test compile this file a second time: MINFER_SCOPES.
template <typename T>
struct Scoped : Activated<T, Relu> {
  ScopeBuffer scopes;
};

template <typename Tile, typename T>
struct Epilogue<Tile, Scoped<T>> : Epilogue<Tile, Activated<T, Relu>> {
  using Epilogue<Tile, Activated<T, Relu>>::Epilogue;
};

template <Layout kLayout, typename Problem>
void launch_layout(const Problem& g) {
  using T = std::remove_pointer_t<decltype(g.c)>;
  if constexpr (kLayout == Layout::TN)  // in NN a copy brings 64 columns
    if (one_wave(g, 64, 32)) return launch_shape<Alone<T, kLayout, 64, 32, 1>>(g);
  if (one_wave(g, 64, 64)) return launch_shape<Alone<T, kLayout, 64, 64, 1>>(g);
  if (one_wave(g, 64, 128)) return launch_shape<Alone<T, kLayout, 64, 128, 2>>(g);
  launch_shape<Alone<T, kLayout, 128, 128, 2>>(g);
}

template <typename Problem>
void launch_problem(const Problem& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

template <typename T>
void launch(const Biased<T>& g) {
  launch_problem(Activated<T, Relu>{g, {}});
}

}  // namespace minfer

#ifdef MINFER_SCOPES
static void gemm_bias_relu_v03_one_wave_scopes(minfer::Tensor y, const minfer::Tensor a, const minfer::Tensor b,
                                               const minfer::Tensor bias, minfer::Tensor scopes) {
  using namespace minfer;
  check_rank(scopes, "gemm_bias_relu: scopes", 4);
  check_sizes(scopes, "gemm_bias_relu: scopes", {scopes.size(0), scopes.size(1), scopes.size(2), 3});
  check_contiguous(scopes, "gemm_bias_relu: scopes");
  const ScopeBuffer buffer{output<int64_t>(scopes, "gemm_bias_relu: scopes"),
                           to_int(scopes.size(0), "gemm_bias_relu: scopes"),
                           to_int(scopes.size(1), "gemm_bias_relu: scopes"),
                           to_int(scopes.size(2), "gemm_bias_relu: scopes")};
  dispatch(y, a, b, bias, [&]<typename T>(const Biased<T>& biased) { launch_problem(Scoped<T>{{biased, {}}, buffer}); });
}
MINFER_OP(gemm_bias_relu_v03_one_wave_scopes,
          "(Tensor(a!) y, Tensor a, Tensor b, Tensor bias, Tensor(b!) scopes) -> ()")
#else
MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v03_one_wave, minfer::launch)
#endif
