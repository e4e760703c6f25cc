// What a kernel must not do, one thing for each K that it is called with; the emulator must say so.
#include "cuda/hopper.cuh"
#include "cuda/mma.cuh"
#include "ops/hgemm/hgemm.h"

template <typename T>
__global__ void forbidden(minfer::Gemm<T> g) {
  __shared__ __align__(16) T tile[32][8];
  __shared__ __align__(16) T other[64];
  extern __shared__ __align__(16) unsigned char dynamic[];
  const int x = threadIdx.x;
  uint32_t fragment[4] = {};
  switch (g.k) {
    case 1:  // a barrier that one thread does not reach
      if (x != 5) __syncthreads();
      break;
    case 2:  // lanes of one warp at different operations
      if (x % 2) __syncwarp();
      else minfer::ldmatrix_x4(fragment, tile[x % 32]);
      break;
    case 3:
      minfer::ldmatrix_x4(fragment, tile[x % 32] + 1);
      break;
    case 4:
      minfer::ldmatrix_x4(fragment, g.a);
      break;
    case 5:
      *reinterpret_cast<uint4*>(other + x % 8) = uint4{};
      break;
    case 6:
      other[x + 32] = T(1.0f);
      break;
    case 7:
      reinterpret_cast<T*>(dynamic)[x * 4096] = T(1.0f);
      break;
    case 8:
      g.c[x * 4096] = T(1.0f);
      break;
    case 9:
      const_cast<T*>(g.a)[0] = T(1.0f);
      break;
    case 10:
      minfer::cp_async_16(tile[x % 32], g.a + 1);
      break;
    case 11:
      minfer::cp_async_16(tile[x % 32], g.a + 4096);
      break;
    case 12:
      minfer::cp_async_16(other + 60, g.a);
      break;
    case 13:
      minfer::cp_async_16(tile[x % 32], g.a);
      minfer::cp_async_commit();
      break;
    case 14:  // the last of two groups is still in flight
      for (int i = 0; i < 2; ++i) {
        minfer::cp_async_16(i ? other : tile[x % 32], g.a);
        minfer::cp_async_commit();
      }
      minfer::cp_async_wait<1>();
      if (x == 0) g.c[0] = tile[0][0], g.c[1] = other[0];
      minfer::cp_async_wait<0>();
      if (x == 0) g.c[2] = other[0];
      break;
    case 15:
      if (x < 8) g.c[x] = x < 4 ? tile[x][x] : other[x];
      break;
    case 16:  // nothing: the launch asks for too much
      break;
    case 17:  // what another thread of the block wrote, with no barrier between
      other[x] = T(float(x));
      g.c[x] = other[63 - x];
      break;
    case 18:
      other[x] = T(float(x));
      __syncthreads();
      g.c[x] = other[63 - x];
      break;
  }
}

// A box whose first element is the second of a row.
template <typename T>
__global__ void unaligned_box(const minfer::TensorMap map) {
  __shared__ __align__(128) T box[8][8];
  __shared__ uint64_t arrived;
  if (threadIdx.x > 0) return;
  minfer::barrier_init(&arrived, 1);
  minfer::barrier_expect(&arrived, sizeof(box));
  minfer::tma_load(box, map, &arrived, 1, 0);
  minfer::barrier_wait(&arrived, 0);
}

__global__ void unbounded() {}
__global__ void __launch_bounds__(256, 1) bounded() {}
__global__ void __maxnreg__(144) of_144_registers() {}

// Two warpgroups take kMost registers a thread, and one keeps kFew; a block of 384 threads is launched with 168 for each.
template <int kFew, int kMost>
__global__ void __launch_bounds__(384, 1) moves_registers() {
  threadIdx.x < 128 ? minfer::registers_down<kFew>() : minfer::registers_up<kMost>();
}

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  if (g.k == 19 || g.k == 20) return unbounded<<<1, g.k == 19 ? 257 : 256, 0, g.stream>>>();
  if (g.k == 21) return bounded<<<1, dim3(64, 5), 0, g.stream>>>();
  if (g.k == 22 || g.k == 23) return of_144_registers<<<1, g.k == 22 ? 416 : 384, 0, g.stream>>>();
  if (g.k == 24) return moves_registers<48, 232><<<1, 384, 0, g.stream>>>();
  if (g.k == 25) return moves_registers<40, 232><<<1, 384, 0, g.stream>>>();
  if (g.k == 32) {
    minfer::TensorMap map;
    STD_TORCH_CHECK(minfer::make_tensor_map(map, g.a, g.m, g.k, g.lda, 8, 8), "no tensor map");
    return unaligned_box<T><<<1, 32, 0, g.stream>>>(map);
  }
  forbidden<<<1, 64, g.k == 16 ? 64 << 10 : 1024, g.stream>>>(g);
}

MINFER_HGEMM(hgemm_forbidden, launch)
