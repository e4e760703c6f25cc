// The emulator's own `minfer/cuda/grid.cuh`.
#pragma once

namespace minfer {

inline unsigned team_arrive(unsigned* arrived, unsigned members, bool is_first) {
  const unsigned before = *arrived;
  *arrived += is_first ? 0x80000000u - (members - 1) : 1;
  if ((before ^ *arrived) & 0x80000000u) {
    const std::vector<emulator::Thread*> waiting = std::move(emulator::state.at_flags[arrived]);
    emulator::state.at_flags.erase(arrived);
    if (!waiting.empty()) emulator::release(waiting);
  }
  return before;
}
inline void team_wait(unsigned* arrived, unsigned before) {
  while (!((before ^ *arrived) & 0x80000000u)) {
    emulator::state.at_flags[arrived].push_back(emulator::state.current);
    emulator::wait_for("a barrier of blocks");
  }
}

inline void team_sync(unsigned* arrived, unsigned members, bool is_first) {
  __syncthreads();
  if (threadIdx.x == 0) team_wait(arrived, team_arrive(arrived, members, is_first));
  __syncthreads();
}

// More blocks than the emulator runs at once would wait for ever, which it says.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_together(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, cudaStream_t stream,
                            const Arguments&... arguments) {
  emulator::Launch launch(blocks, threads, shared, stream);
  launch.together = true;
  emulator::launch(launch, [&] { kernel(arguments...); });
  return cudaSuccess;
}

}  // namespace minfer
