// The emulator's own `minfer/cuda/tma_heads.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

struct HeadsMap {
  char* begin = nullptr;
  int batch, tokens, heads, dim, box_tokens;
  int64_t of_batch, of_token, of_head;  // bytes
};

inline void tma_prefetch(const HeadsMap&) {}

inline void tma_load_heads(void* box, const HeadsMap& map, uint64_t* barrier, int x, int head, int token, int batch) {
  const int bytes = map.box_tokens * 128;
  if (reinterpret_cast<uintptr_t>(box) % 1024) emulator::fail("TMA: a box is at no multiple of 1024 bytes");
  if (!emulator::state.current->block->find(box, bytes)) emulator::fail("TMA: a box is outside shared memory");
  if (head < 0 || head >= map.heads || batch < 0 || batch >= map.batch || x < 0 || x + 64 > map.dim)
    emulator::fail("TMA: a box of a head that is not there");
  emulator::Barrier* full = &emulator::barrier_at(barrier);
  memset(box, 0xff, bytes);
  emulator::start([=] {
    for (int r = 0; r < map.box_tokens; ++r)
      for (int c = 0; c < 128; c += 16) {
        char* to = emulator::swizzled(static_cast<char*>(box) + r * 128 + c);
        const bool inside = token + r >= 0 && token + r < map.tokens;
        const char* from = map.begin + batch * map.of_batch + (token + r) * map.of_token + head * map.of_head + x * 2 + c;
        inside ? memcpy(to, from, 16) : memset(to, 0, 16);
      }
    full->bytes -= bytes;
    emulator::end_phase_if_complete(*full);
  });
}

template <typename T>
bool make_heads_map(HeadsMap& map, const T* begin, int batch, int tokens, int heads, int dim, int64_t of_batch,
                    int64_t of_token, int64_t of_head, int box_tokens) {
  map = {const_cast<char*>(reinterpret_cast<const char*>(begin)), batch, tokens, heads, dim, box_tokens,
         of_batch * 2, of_token * 2, of_head * 2};
  return batch > 0 && tokens > 0 && heads > 0 && dim % 64 == 0 && box_tokens > 0 && box_tokens <= 256 &&
         of_batch % 8 == 0 && of_token % 8 == 0 && of_head % 8 == 0;
}

}  // namespace minfer
