// What the captured listings in this folder are of; `sample.sm_90a.*` were made with CUDA 13.2's cuobjdump and nvdisasm.
#include <cuda_fp16.h>

#include <cstdint>

namespace sample {

template <typename T, int kStages>
__global__ void __launch_bounds__(64, 2) product(T* out, const uint4* in, int n) {
  __shared__ uint4 tile[64];
  const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(&tile[threadIdx.x]));
  if (threadIdx.x < n) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(in + threadIdx.x));
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  uint32_t a[4], b[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(place));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(place));
  float c[4] = {};
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  out[threadIdx.x] = T(c[0] + c[1] + c[2] + c[3]);
}

template __global__ void product<__half, 3>(__half*, const uint4*, int);

}  // namespace sample

extern "C" __global__ void copy(uint4* out, const uint4* in) {
  out[threadIdx.x] = in[threadIdx.x];
}
