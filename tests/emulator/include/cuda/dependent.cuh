// The emulator's own `minfer/cuda/dependent.cuh`. A launch runs when the previous one has ended.
#pragma once

namespace minfer {

inline void let_next_start() {}
inline void wait_for_previous() {}
inline void prefetch_to_l2(const void*) {}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared, cudaStream_t stream,
                         const Arguments&... arguments) {
  emulator::Launch launch(blocks, threads, shared, stream);
  launch.cluster = cluster;
  emulator::launch(launch, [&] { kernel(arguments...); });
  return cudaSuccess;
}

}  // namespace minfer
