// Into how many parts kernels divide the keys of an item.
#pragma once

#include <algorithm>
#include <cstdint>

namespace minfer {

// Where blocks have 64 keys, as in v14_key_parts.
constexpr int kLeastBlocks = 4;    // of a part
constexpr int kBlocksBesides = 6;  // the fixed cost of a part, in blocks: its first copies, its store, its addition
// The same where they have 128, as in v17_wide_parts.
constexpr int kLeastWide = 2, kBesidesWide = 4;
constexpr int kMostParts = 64;
constexpr int kMostWaves = 8;  // of parts; it bounds the memory for their sums

// The number of parts of each of `items`, the longest of which sees `blocks` of keys: the smallest number with which all waves
// take the least time. A part has at least `least` blocks, and a fixed cost of `besides` blocks. It is a pure function.
inline int count_parts(int64_t items, int64_t blocks, int multiprocessors, int least = kLeastBlocks,
                       int besides = kBlocksBesides) {
  const int64_t in_waves = int64_t(kMostWaves) * multiprocessors / std::max<int64_t>(items, 1);
  const int64_t most = std::clamp<int64_t>(std::min(blocks / least, in_waves), 1, kMostParts);
  int64_t best = 1, shortest = INT64_MAX;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const int64_t waves = (items * parts + multiprocessors - 1) / multiprocessors;
    const int64_t time = waves * ((blocks + parts - 1) / parts + besides);
    if (time < shortest) shortest = time, best = parts;
  }
  return static_cast<int>(best);
}

}  // namespace minfer
