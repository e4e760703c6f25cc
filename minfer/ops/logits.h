// Rows of logits from which tokens are drawn, for the ops that draw some.
#pragma once

#include <algorithm>
#include <cmath>

#include "ops/op.h"

namespace minfer {

// Rows of logits are contiguous and `stride` elements apart.
template <typename T>
struct Sample {
  int32_t* tokens;
  const T* logits;
  const float* u;
  int rows, vocab;
  int64_t stride;
  float scale;     // log2(e) / temperature: a difference of logits in octaves of probability
  int top_k;       // 0: any
  float top_p;     // 1: any
  float min_p_octaves;  // how far below the most probable token one may be; infinity: any
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

template <typename T>
Sample<T> make_sample(const Tensor& tokens, const Tensor& logits, const Tensor& u, double temperature, int64_t top_k,
                      double top_p, double min_p) {
  check_rank(logits, "sample: logits", 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_sizes(tokens, "sample: tokens", {rows});
  check_sizes(u, "sample: u", {rows});
  check_rows(logits, "sample: logits");
  check_contiguous(tokens, "sample: tokens");
  check_contiguous(u, "sample: u");
  STD_TORCH_CHECK(temperature > 0, "sample: temperature must be above 0, got ", temperature);
  STD_TORCH_CHECK(top_k >= 0, "sample: top_k must be at least 0, got ", top_k);
  STD_TORCH_CHECK(top_p > 0 && top_p <= 1, "sample: top_p must be above 0 and at most 1, got ", top_p);
  STD_TORCH_CHECK(min_p >= 0 && min_p <= 1, "sample: min_p must be from 0 to 1, got ", min_p);

  Sample<T> p;
  p.tokens = output<int32_t>(tokens, "sample: tokens");
  p.logits = input<T>(logits, "sample: logits"), p.u = input<float>(u, "sample: u");
  p.rows = to_int(rows, "sample: logits"), p.vocab = to_int(vocab, "sample: logits");
  STD_TORCH_CHECK(p.vocab <= 1 << 19, "sample: logits must have at most 524288 columns, got ", p.vocab);
  p.stride = rows > 1 ? logits.stride(0) : vocab;
  p.scale = static_cast<float>(1.4426950408889634 / temperature);
  p.top_k = top_k < vocab ? static_cast<int>(top_k) : 0;
  p.top_p = static_cast<float>(top_p);
  p.min_p_octaves = static_cast<float>(-std::log2(min_p));
#ifdef __CUDACC__
  p.stream = stream_of(logits);
#endif
  return p;
}

}  // namespace minfer
