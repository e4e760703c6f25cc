// A launch that begins before the previous one of its stream has ended, which Hopper has (sm_90 and up; other GPUs launch it as
// any other). From the PTX ISA: "griddepcontrol".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minfer {

// From here on a launch that follows by `launch_early` may start its blocks, where there is room for them.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous launch has ended: this thread then sees what it wrote. Returns at once in other launches.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void prefetch_to_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Launches a kernel in clusters of `cluster` blocks along x. The previous launch must have ended for all that the kernel reads
// before `wait_for_previous`.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared, cudaStream_t stream,
                         const Arguments&... arguments) {
  int device = 0, major = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device); error != cudaSuccess)
    return error;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes;
  if (major >= 9) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& last = attributes[config.numAttrs++];
    last.id = cudaLaunchAttributeClusterDimension;
    last.val.clusterDim.x = cluster, last.val.clusterDim.y = 1, last.val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace minfer
