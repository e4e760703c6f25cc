// Quantised weights, for CUDA and C++: how eight neighbours of a row are decoded, in each format. Layouts: docs/dequant.md.
#pragma once

#include <bit>
#include <cmath>

#include "ops/op.h"

namespace minfer {

// A matrix (n, k) of weights; S is the type of the scales. GGUF's formats have theirs in `w`.
template <typename S>
struct Weights {
  const uint8_t* w;
  const S *scales, *zeros;
  int64_t n;
  int k;
};

MINFER_EITHER inline float half_at(const uint8_t* p) {
  const unsigned short bits = static_cast<unsigned short>(p[0] | p[1] << 8);
#ifdef __CUDACC__
  __half_raw raw;
  raw.x = bits;
  return float(Half(raw));
#else
  return static_cast<float>(Half(bits, Half::from_bits()));
#endif
}

MINFER_EITHER inline float from_e4m3(uint8_t byte) {
  const uint32_t sign = uint32_t(byte & 0x80) << 24, rest = byte & 0x7f;
  // Sign, exponent and mantissa, put where fp32 has them, are the number divided by 2^120, also where it is subnormal.
  const float scaled = std::bit_cast<float>(sign | rest << 20) * 0x1p120f;
  return rest == 0x7f ? std::bit_cast<float>(sign | 0x7fc00000u) : scaled;
}

// kBlock weights take kBytes of a row. decode() returns weights i to i + 7 of a block; i is a multiple of 8. Where scales are
// not in the block, group() and row() say which ones belong to it.
struct Q8_0 {
  static constexpr int kBlock = 32, kBytes = 34;
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S*, const S*, float (&out)[8]) {
    const float d = half_at(block);
    for (int j = 0; j < 8; ++j) out[j] = d * static_cast<float>(static_cast<int8_t>(block[2 + i + j]));
  }
};

struct Q4_0 {
  static constexpr int kBlock = 32, kBytes = 18;
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S*, const S*, float (&out)[8]) {
    const float d = half_at(block);
    for (int j = 0; j < 8; ++j) out[j] = d * static_cast<float>((block[2 + i % 16 + j] >> i / 16 * 4 & 15) - 8);
  }
};

struct Q4_K {
  static constexpr int kBlock = 256, kBytes = 144;
  // The scale and the least value of 32 weights, as whole numbers of 6 bits; sub is 0 to 7.
  MINFER_EITHER static void scale_of(const uint8_t* block, int sub, int& scale, int& least) {
    const uint8_t* p = block + 4 + sub % 4;
    scale = sub < 4 ? p[0] & 63 : (p[8] & 15) | (p[0] >> 2 & 48);
    least = sub < 4 ? p[4] & 63 : p[8] >> 4 | (p[4] >> 2 & 48);
  }
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S*, const S*, float (&out)[8]) {
    const int sub = i / 32;
    int scale, least;
    scale_of(block, sub, scale, least);
    // d and m have 17 bits at most, and d times a weight 21: they are exact, and only the difference is rounded, fused or not.
    const float d = half_at(block) * static_cast<float>(scale), m = half_at(block + 2) * static_cast<float>(least);
    const uint8_t* q = block + 16 + sub / 2 * 32 + i % 32;
    for (int j = 0; j < 8; ++j) out[j] = d * static_cast<float>(q[j] >> sub % 2 * 4 & 15) - m;
  }
};

struct Q6_K {
  static constexpr int kBlock = 256, kBytes = 210;
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S*, const S*, float (&out)[8]) {
    const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
    const float d = half_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + i / 16]));
    const uint8_t *low = block + half * 64 + quarter % 2 * 32 + at, *high = block + 128 + half * 32 + at;
    for (int j = 0; j < 8; ++j) {
      const int q = (low[j] >> quarter / 2 * 4 & 15) | (high[j] >> quarter * 2 & 3) << 4;
      out[j] = d * static_cast<float>(q - 32);
    }
  }
};

template <int kGroup>
struct Int4 {
  static constexpr int kBlock = kGroup, kBytes = kGroup / 2;
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S* scale, const S* zero, float (&out)[8]) {
    const float s = static_cast<float>(*scale), z = static_cast<float>(*zero);
    for (int j = 0; j < 8; ++j) out[j] = (static_cast<float>(block[(i + j) / 2] >> j % 2 * 4 & 15) - z) * s;
  }
};

struct Fp8 {
  static constexpr int kBlock = 32, kBytes = 32;  // read 32 at a time; a row has one scale
  template <typename S>
  MINFER_EITHER static void decode(const uint8_t* block, int i, const S* scale, const S*, float (&out)[8]) {
    for (int j = 0; j < 8; ++j) out[j] = from_e4m3(block[i + j]) * static_cast<float>(*scale);
  }
};

template <typename F>
constexpr bool kIsInt4 = false;
template <int kGroup>
constexpr bool kIsInt4<Int4<kGroup>> = true;
template <typename F>
constexpr bool kIsFp8 = std::is_same_v<F, Fp8>;

// The scales of a format for results of T.
template <typename F, typename T>
using Scale = std::conditional_t<kIsFp8<F>, float, T>;

// The weights k to k + 7 of a row; k is a multiple of 8.
template <typename F, typename S>
MINFER_EITHER inline void eight_weights(const Weights<S>& weights, int64_t row, int k, float (&out)[8]) {
  const int64_t block = row * (weights.k / F::kBlock) + k / F::kBlock;
  const int64_t scale = kIsFp8<F> ? row : kIsInt4<F> ? block : 0;
  F::decode(weights.w + block * F::kBytes, k % F::kBlock, weights.scales + scale, weights.zeros + (kIsInt4<F> ? block : 0),
            out);
}

// Calls f.operator()<F>() with the format of `w`: by its dtype, or the bytes of its blocks.
template <typename Call>
void with_format(const Tensor& w, const char* who, Call f) {
  if (w.scalar_type() == ScalarType::Float8_e4m3fn) return check_rank(w, who, 2), f.template operator()<Fp8>();
  check_rank(w, who, 3);
  switch (w.size(2)) {
    case Q8_0::kBytes: return f.template operator()<Q8_0>();
    case Q4_0::kBytes: return f.template operator()<Q4_0>();
    case Q4_K::kBytes: return f.template operator()<Q4_K>();
    case Q6_K::kBytes: return f.template operator()<Q6_K>();
    case 32: return f.template operator()<Int4<64>>();
    case 64: return f.template operator()<Int4<128>>();
    default: STD_TORCH_CHECK(false, who, " must have blocks of 18, 32, 34, 64, 144 or 210 bytes, got ", w.size(2));
  }
}

// A matrix of format F for results of T. Throws a sentence where the tensors do not fit each other, in the name of an op.
template <typename F, typename T>
Weights<Scale<F, T>> make_weights(const Tensor& w, const Tensor& scales, const Tensor& zeros, const std::string& op) {
  using S = Scale<F, T>;
  const std::string of_w = op + ": w", of_scales = op + ": scales", of_zeros = op + ": zeros";
  const int64_t n = w.size(0), k = kIsFp8<F> ? w.size(1) : w.size(1) * F::kBlock;
  STD_TORCH_CHECK(k % F::kBlock == 0, of_w, " must have rows of a multiple of ", F::kBlock, " weights, got ", k);
  check_contiguous(w, of_w.c_str());
  Weights<S> made{static_cast<const uint8_t*>(w.const_data_ptr()), nullptr, nullptr, n, to_int(k, of_w.c_str())};
  if constexpr (!kIsFp8<F>) check_dtype(w, of_w.c_str(), ScalarType::Byte);
  if constexpr (kIsFp8<F>) check_sizes(scales, of_scales.c_str(), {n});
  if constexpr (kIsInt4<F>) {
    check_sizes(scales, of_scales.c_str(), {n, k / F::kBlock});
    check_sizes(zeros, of_zeros.c_str(), {n, k / F::kBlock});
    check_contiguous(zeros, of_zeros.c_str());
    made.zeros = input<S>(zeros, of_zeros.c_str());
  }
  if constexpr (kIsFp8<F> || kIsInt4<F>) {
    check_contiguous(scales, of_scales.c_str());
    made.scales = input<S>(scales, of_scales.c_str());
  }
  return made;
}

}  // namespace minfer
