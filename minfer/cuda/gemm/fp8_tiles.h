// The tiles of quant_gemm's v12_fp8_fitted, and the model by which it chooses among them.
#pragma once

#include "cuda/gemm/fitted_choice.h"

namespace minfer {

#define MINFER_FP8_TILES(F) \
  F(64, 64, 1, 0.885, 0.885) F(80, 64, 1, 1.069, 1.069) F(64, 128, 1, 1.104, 1.104) F(80, 128, 1, 1.071, 1.071) \
  F(96, 128, 1, 1.043, 1.043) F(128, 128, 1, 1.015, 1.015) F(96, 128, 2, 0.919, 0.973) F(104, 128, 2, 0.940, 1.010) \
  F(112, 128, 2, 0.955, 0.997) F(120, 128, 2, 0.951, 0.990) F(128, 128, 2, 0.961, 0.982) F(136, 128, 2, 1.142, 1.153) \
  F(152, 128, 2, 1.138, 1.142) F(176, 128, 2, 1.173, 1.171) F(192, 128, 2, 1.154, 1.150) F(80, 192, 2, 1.041, 1.122) \
  F(88, 192, 2, 1.013, 1.104) F(96, 192, 2, 1.040, 1.082) F(104, 192, 2, 1.054, 1.095) F(112, 192, 2, 1.057, 1.079) \
  F(120, 192, 2, 1.061, 1.082) F(128, 192, 2, 1.067, 1.081) F(144, 192, 2, 1.159, 1.169) F(160, 192, 2, 1.162, 1.169) \
  F(192, 192, 2, 1.303, 1.302) F(104, 256, 2, 1.273, 1.293)

#define MINFER_FP8_TILE(...) {__VA_ARGS__},
constexpr FittedTile kFp8Tiles[] = {MINFER_FP8_TILES(MINFER_FP8_TILE)};
#undef MINFER_FP8_TILE

// Fitted to 40,625 cold timings of 951 random products of 24 models, with 129 to 8192 rows, on an H200. A step has 128 numbers
// in k, as many bytes as 64 of 16 bits.
constexpr FittedModel kModelOfFp8{.arrive = 103.5, .of_step = 157.3, .nn = 1, .idle_alone = 0.267, .idle_shared = 0.061,
                                  .of_tile = 2495, .memory = 4.976e6, .memory_start = 5.87, .start = 4.1,
                                  .sums_of_2 = 1.411e-4, .sums_of_4 = 1.876e-4};

}  // namespace minfer
