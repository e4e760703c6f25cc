// v02_vectors: 16 bytes a thread, blocks that go over several tokens of a head.
// Idea: values and both log-sum-exps are loaded before the first is used, so that a thread waits once. Log-sum-exps of
// neighbouring tokens are neighbours in memory and those of neighbouring heads are not. So a block takes up to 8 tokens of a
// head before the next head, and uses all of the 32 bytes that a read of a log-sum-exp brings.
// Expected: the copy's speed. 2048 threads of an SM have 64 KB of values in flight.
#include "cuda/vector.cuh"
#include "merge_state.h"

namespace minfer {

constexpr int kThreads = 256, kMostLogTokens = 3;

// Blocks are numbered by sequence, by group of 2^log_tokens tokens, and by part of the heads.
template <typename T>
__global__ void __launch_bounds__(kThreads) vectors(States<T> p, int log_tokens, int groups, int parts) {
  const int pieces = p.dim / Vector<T>::kCount;
  const int part = blockIdx.x % parts, group = blockIdx.x / parts % groups, number = blockIdx.x / parts / groups;
  const int64_t index = static_cast<int64_t>(part) * kThreads + threadIdx.x;
  const int row = static_cast<int>(index / pieces), piece = static_cast<int>(index - static_cast<int64_t>(row) * pieces);
  const int head = row >> log_tokens, token = (group << log_tokens) + (row & (1 << log_tokens) - 1);
  if (head >= p.heads || token >= p.seq) return;  //@ last_tokens
  const Vector<T> of_a(reinterpret_cast<const uint4*>(p.a.at(number, token, head))[piece]);
  const Vector<T> of_b(reinterpret_cast<const uint4*>(p.b.at(number, token, head))[piece]);
  const float a_lse = p.a_lse.at(number, head, token), b_lse = p.b_lse.at(number, head, token);
  float a[Vector<T>::kCount], b[Vector<T>::kCount], merged[Vector<T>::kCount];
  of_a.unpack(a), of_b.unpack(b);
  const Weights weights(a_lse, b_lse);
#pragma unroll
  for (int i = 0; i < Vector<T>::kCount; ++i) merged[i] = weights.merge(a[i], b[i]);  //@ unused_values
  reinterpret_cast<uint4*>(p.out.at(number, token, head))[piece] = Vector<T>(merged).bits;
  if (piece == 0) p.lse.at(number, head, token) = log_add_exp(a_lse, b_lse);
}

template <typename T>
void launch(const States<T>& p) {
  check_rows_in_pieces(p.out, p.dim, "merge_state: out");
  check_rows_in_pieces(p.a, p.dim, "merge_state: a"), check_rows_in_pieces(p.b, p.dim, "merge_state: b");
  int log_tokens = 0;
  while (log_tokens < kMostLogTokens && 1 << log_tokens < p.seq) ++log_tokens;
  const int groups = (p.seq - 1 >> log_tokens) + 1;
  const int64_t threads = (int64_t(p.heads) << log_tokens) * (p.dim / Vector<T>::kCount);
  const int64_t parts = (threads + kThreads - 1) / kThreads, blocks = parts * groups * p.batch;
  STD_TORCH_CHECK(blocks <= INT_MAX && int64_t(p.heads) << log_tokens <= INT_MAX, "merge_state: a must have fewer rows, got a batch of ", p.batch, " with ", p.seq, " tokens");
  vectors<T><<<static_cast<unsigned>(blocks), kThreads, 0, p.stream>>>(p, log_tokens, groups, static_cast<int>(parts));
}

}  // namespace minfer

MINFER_MERGE_STATE(merge_state_v02_vectors, minfer::launch)
