// The emulator's own `minfer/cuda/tma_heads.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

struct HeadsMap {
  char* begin = nullptr;
  int batch, tokens, heads, dim, box_tokens;
  int64_t of_batch, of_token, of_head;  // bytes
  int box_heads = 1;
};

inline void tma_prefetch(const HeadsMap&) {}

// What a copy of a box must hold to.
inline int check_heads_box(const HeadsMap& map, const void* box, int x, int head, int batch) {
  const int bytes = map.box_tokens * map.box_heads * 128;
  if (reinterpret_cast<uintptr_t>(box) % 1024) emulator::fail("TMA: a box is at no multiple of 1024 bytes");
  if (!emulator::state.current->block->find(box, bytes)) emulator::fail("TMA: a box is outside shared memory");
  if (head < 0 || head + map.box_heads > map.heads || batch < 0 || batch >= map.batch || x < 0 || x >= map.dim)
    emulator::fail("TMA: a box of a head that is not there");
  return bytes;
}

// Calls f(shared, global) for each 16 bytes of a box; global is null for what lies outside of the tensor.
template <typename F>
void for_heads_pieces(const HeadsMap& map, char* box, int x, int head, int token, int batch, F f) {
  for (int r = 0; r < map.box_tokens * map.box_heads; ++r)
    for (int c = 0; c < 128; c += 16) {
      const int row = token + r / map.box_heads, of = head + r % map.box_heads;
      const bool inside = row >= 0 && row < map.tokens && x * 2 + c < map.dim * 2;
      char* at = map.begin + batch * map.of_batch + row * map.of_token + of * map.of_head + x * 2 + c;
      f(emulator::swizzled(box + r * 128 + c), inside ? at : nullptr);
    }
}

inline void tma_load_heads_multicast(void* box, const HeadsMap& map, uint64_t* barrier, int x, int head, int token, int batch,
                                     uint16_t blocks) {
  const int bytes = check_heads_box(map, box, x, head, batch);
  for (int block = 0; block < 16; ++block) {
    if (!(blocks >> block & 1)) continue;
    char* to = emulator::at_block(box, block);
    emulator::Barrier* full = &emulator::barrier_at(emulator::at_block(barrier, block));
    memset(to, 0xff, bytes);
    emulator::start([=, other = emulator::state.current->block + block - emulator::state.current->block->rank] {
      if (emulator::has_ended(*other)) emulator::fail("TMA copies to a block that has ended");
      for_heads_pieces(map, to, x, head, token, batch,
                       [](char* to, const char* from) { from ? memcpy(to, from, 16) : memset(to, 0, 16); });
      full->bytes -= bytes;
      emulator::end_phase_if_complete(*full);
    });
  }
}
inline void tma_load_heads(void* box, const HeadsMap& map, uint64_t* barrier, int x, int head, int token, int batch) {
  tma_load_heads_multicast(box, map, barrier, x, head, token, batch, 1 << emulator::state.current->block->rank);
}

inline void tma_store_heads(const HeadsMap& map, const void* box, int x, int head, int token, int batch) {
  const int bytes = check_heads_box(map, box, x, head, batch);
  start_store(static_cast<char*>(const_cast<void*>(box)), bytes, [=](char* from) {
    for_heads_pieces(map, from, x, head, token, batch, [](char* from, char* to) { if (to) memcpy(to, from, 16); });
  });
}

template <typename T>
bool make_heads_map(HeadsMap& map, const T* begin, int batch, int tokens, int heads, int dim, int64_t of_batch,
                    int64_t of_token, int64_t of_head, int box_tokens) {
  map = {const_cast<char*>(reinterpret_cast<const char*>(begin)), batch, tokens, heads, dim, box_tokens,
         of_batch * 2, of_token * 2, of_head * 2};
  return batch > 0 && tokens > 0 && heads > 0 && dim % 8 == 0 && box_tokens > 0 && box_tokens <= 256 &&
         of_batch % 8 == 0 && of_token % 8 == 0 && of_head % 8 == 0;
}

}  // namespace minfer
