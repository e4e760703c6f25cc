// Scopes within a kernel: each warp records in a buffer when its parts begin and end. benchmarks/scopes.py makes a Chrome trace
// of it.
// A kernel marks its parts. For a problem without a buffer, the marks compile to nothing:
//
//     Scopes<Problem> scopes(g);
//     scopes.begin();
//     ...
//     scopes.end(kProduct);
#pragma once

#include "cuda/clocks.cuh"

namespace minfer {

// int64 (blocks, tracks, slots, 3), zeros before the launch. A track is a warp. Its first slot has {nanoseconds, cycles, SM} of
// its start, each further one {1 + number of the scope, cycles at its begin, cycles at its end}, in the order in which scopes
// end. Scopes beyond the last slot are left out.
struct ScopeBuffer {
  int64_t* data;
  int blocks, tracks, slots;
};

template <typename Problem>
class Scopes {
 public:
  __device__ explicit Scopes(const Problem&) {}
  __device__ void begin() {}
  __device__ void end(int) {}
};

// For a problem with a member `ScopeBuffer scopes`: the first lane of each warp writes.
template <typename Problem>
  requires requires(Problem g) { g.scopes.data; }
class Scopes<Problem> {
 public:
  __device__ explicit Scopes(const Problem& g) {
    const ScopeBuffer& to = g.scopes;
    const int64_t block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
    const int track = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || block >= to.blocks || track >= to.tracks) return;
    next_ = to.data + (block * to.tracks + track) * to.slots * 3;
    last_ = next_ + int64_t(to.slots) * 3;
    write(nanoseconds(), cycles(), multiprocessor());
  }

  __device__ void begin() { begin_ = cycles(); }
  __device__ void end(int scope) { write(1 + scope, begin_, cycles()); }

 private:
  int64_t *next_ = nullptr, *last_ = nullptr;
  int64_t begin_ = 0;

  __device__ void write(int64_t first, int64_t second, int64_t third) {
    if (next_ == last_) return;
    next_[0] = first, next_[1] = second, next_[2] = third;
    next_ += 3;
  }
};

}  // namespace minfer
