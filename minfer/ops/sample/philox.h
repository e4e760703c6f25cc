// Random numbers that are a function of a seed and a place: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random
// numbers: as easy as 1, 2, 3, 2011).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MINFER_PHILOX __host__ __device__ inline
#else
#define MINFER_PHILOX inline
#endif

namespace minfer {

struct Words {
  uint32_t x, y, z, w;
};

// Ten rounds of a bijection of 128 bits, the counter, under a key of 64 bits.
MINFER_PHILOX Words philox(Words counter, uint32_t low_key, uint32_t high_key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53} * counter.x, b = uint64_t{0xcd9e8d57} * counter.z;
    counter = {uint32_t(b >> 32) ^ counter.y ^ low_key, uint32_t(b), uint32_t(a >> 32) ^ counter.w ^ high_key, uint32_t(a)};
    low_key += 0x9e3779b9, high_key += 0xbb67ae85;
  }
  return counter;
}

// The number of a row in [0, 1). PyTorch's `torch.rand` draws the same one on a GPU, for a generator with this seed and offset,
// if it has at most a row for each thread that runs at once: there, too, a counter is the offset / 4 and the thread.
MINFER_PHILOX float uniform_of(uint64_t seed, uint64_t offset, uint32_t row) {
  const uint64_t at = offset / 4;
  const Words words = philox({uint32_t(at), uint32_t(at >> 32), row, 0}, uint32_t(seed), uint32_t(seed >> 32));
  const float u = float(words.x) * 0x1p-32f + 0x1p-33f;  // in (0, 1]
  return u < 1.0f ? u : 0.0f;
}

}  // namespace minfer
