// Blocks that run at once and wait for each other: a cooperative launch, which starts all of them or fails, so that no
// block waits for one that has no place; and a barrier of some of them.
// From the PTX ISA, "Memory Consistency Model", and the CUDA runtime's cudaLaunchAttributeCooperative.
#pragma once

#include <cuda_runtime_api.h>

namespace minfer {

// A barrier of the threads of `members` blocks, of which one calls it as the first. What any of them wrote to global memory
// before it, all of them may read behind it, past L1 (`__ldcg`). The blocks are one-dimensional. The counter's lower bits
// are zero before and after, and each barrier turns its highest bit, so that nothing resets it, and the next launch may
// have other members.
__device__ inline void team_sync(unsigned* arrived, unsigned members, bool is_first) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned step = is_first ? 0x80000000u - (members - 1) : 1;  // together 2^31
    unsigned before, now;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(step) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    } while (!((before ^ now) & 0x80000000u));
  }
  __syncthreads();
}

// A launch of blocks that all run at once; an error where the GPU has no place for them.
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
