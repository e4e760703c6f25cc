// Blocks that run at once and wait for each other. A cooperative launch starts all of them or fails, so that no block waits for
// one that cannot start; and a barrier of some of them.
// From the PTX ISA, "Memory Consistency Model", and the CUDA runtime's cudaLaunchAttributeCooperative.
#pragma once

#include <cuda_runtime_api.h>

namespace minfer {

// A barrier of the threads of `members` blocks, in two halves: one thread of each block arrives, after a barrier of its
// block, and one waits for the others, with what it had from its arrival; then another barrier of the block. What any of the
// blocks' threads wrote to global memory before, all may read after it, past L1 (`__ldcg`). The blocks are one-dimensional,
// and one of them calls it with `is_first`. The lower bits of the counter are zero before and after, and each barrier flips
// its highest bit. So nothing has to reset it, and the next launch may have other members.
__device__ inline unsigned team_arrive(unsigned* arrived, unsigned members, bool is_first) {
  const unsigned step = is_first ? 0x80000000u - (members - 1) : 1;  // together 2^31
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(step) : "memory");
  return before;
}
__device__ inline void team_wait(unsigned* arrived, unsigned before) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
  } while (!((before ^ now) & 0x80000000u));
}

// The whole barrier, for all threads of a block to call.
__device__ inline void team_sync(unsigned* arrived, unsigned members, bool is_first) {
  __syncthreads();
  if (threadIdx.x == 0) team_wait(arrived, team_arrive(arrived, members, is_first));
  __syncthreads();
}

// A launch of blocks that all run at once; an error where they do not fit the GPU.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_together(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, cudaStream_t stream,
                            const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace minfer
