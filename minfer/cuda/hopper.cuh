// The PTX that only Hopper has (sm_90a), as functions of the instructions' names: barriers in shared memory, the copy
// engine (TMA), products of a warpgroup, clusters; and on the host, what a launch with them needs.
// From the PTX ISA: "mbarrier", "cp.async.bulk.tensor", "Asynchronous Warpgroup Level Matrix Instructions", "stmatrix",
// "setmaxnreg" and "barrier.cluster".
#pragma once

#include <cuda.h>

#include <map>
#include <mutex>
#include <tuple>

#include "cuda/mma.cuh"

namespace minfer {

// --- Barriers in shared memory --------------------------------------------------------------------------------------
// A barrier's phase ends when `arrivals` have come and the bytes that were expected have been written. A wait names the
// parity of the phase, which is 0 for the first; it waits for nothing if the phase before the present one has it.

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After barrier_init and before the barrier of all threads: other threads, blocks and the copy engine see it.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and expects that many bytes in this phase.
__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier in the same place of another block of the cluster. What the thread wrote is not made known to
// that block: a release for the cluster would cost a MEMBAR.GPU, and a stage that has been read has nothing to tell.
__device__ inline void barrier_arrive_at(uint64_t* barrier, int block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}

__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// --- The copy engine ------------------------------------------------------------------------------------------------
// Copies boxes of a matrix between global memory and shared memory, where the rows of a box lie one after the other. If
// they are 128 bytes long, the 16-byte pieces of row r are in the order i ^ (r % 8): the 128-byte swizzle, whose boxes
// start at multiples of 1024 bytes, others at multiples of 128 (tools/print_swizzle.py prints all swizzles). What is outside of the matrix is read as zero and not written. x counts columns, y rows.

using TensorMap = CUtensorMap;

// Asks for the map itself, which is in memory too.
__device__ inline void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread starts the copy; its bytes arrive at `barrier`.
__device__ inline void tma_load(void* box, const TensorMap& map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(box)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// The same to the same place of each block of the cluster whose bit is in `blocks`, with its bytes at that block's
// barrier.
__device__ inline void tma_load_multicast(void* box, const TensorMap& map, uint64_t* barrier, int x, int y,
                                          uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(box)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// One thread copies bytes that lie side by side, multiples of 16; they arrive at `barrier`. Other blocks may have written
// them: see fence_async_global.
__device__ inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// After a thread has learned that others' ordinary writes to global memory are done: the copies that it starts see them.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Ordinary writes to shared memory before it are seen by the copy engine and by wgmma after it.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void tma_store(const TensorMap& map, const void* box, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(box)), "r"(x), "r"(y)
               : "memory");
}

// Closes the group of this thread's stores since the last one.
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's youngest groups have yet to read shared memory.
template <int kPending>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Writes four 8x8 matrices of 16-bit elements: lane 8 i + r points to the place of row r of matrix i. The fragments
// are as ldmatrix_x4 gives them.
__device__ inline void stmatrix_x4(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// --- Products of a warpgroup ----------------------------------------------------------------------------------------

// Describes a tile in the 128-byte swizzle to wgmma. Bits 0-13 hold its address, 16-29 the leading and 32-45 the stride
// offset, all in units of 16 bytes, and 62-63 the swizzle. The tile is made of groups of 8 rows of 128 bytes, which are
// `stride` bytes apart. A row is 64 steps in k; or, of a transposed B, 64 columns at one k, and then 64 columns more are
// `leading` bytes further ("Strides" in "Shared Memory Matrix Layout"; without, the leading offset is not used).
__device__ inline uint64_t tile_descriptor(const void* tile, int leading, int stride) {
  return uint64_t((shared_address(tile) & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
         uint64_t{1} << 62;
}

// Orders the accumulators' registers: before the first product that adds to what a thread wrote.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the warpgroup's products since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the youngest groups are in flight: the older ones have read shared memory.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Waits for all, after which the thread may read its accumulators; the compiler moves no read of them before.
template <int kM, int kN>
__device__ inline void wgmma_finish(float (&d)[kM][kN]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) asm volatile("" : "+f"(d[i / kN][i % kN])::"memory");
}

#define MINFER_10(I) "%" #I "0,%" #I "1,%" #I "2,%" #I "3,%" #I "4,%" #I "5,%" #I "6,%" #I "7,%" #I "8,%" #I "9,"
#define MINFER_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MINFER_REGISTERS_24 MINFER_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MINFER_REGISTERS_30 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," MINFER_10(1) MINFER_10(2)
#define MINFER_REGISTERS_32 MINFER_REGISTERS_30 "%30,%31"
#define MINFER_REGISTERS_48 MINFER_REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MINFER_REGISTERS_56 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) "%50,%51,%52,%53,%54,%55"
#define MINFER_REGISTERS_64 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) "%60,%61,%62,%63"
#define MINFER_REGISTERS_96                                                                                      \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) MINFER_10(8) "%90,%91,%92,%93,"  \
                                                                                                    "%94,%95"
#define MINFER_REGISTERS_112                                                                                     \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) MINFER_10(8) MINFER_10(9)        \
  MINFER_10(10) "%110,%111"
#define MINFER_REGISTERS_128                                                                                     \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) MINFER_10(8) MINFER_10(9)        \
  MINFER_10(10) MINFER_10(11) "%120,%121,%122,%123,%124,%125,%126,%127"
#define MINFER_D4(I) "+f"(d[I]), "+f"(d[(I) + 1]), "+f"(d[(I) + 2]), "+f"(d[(I) + 3])
#define MINFER_D8(I) MINFER_D4(I), MINFER_D4(I + 4)
#define MINFER_D16(I) MINFER_D8(I), MINFER_D8(I + 8)
#define MINFER_D32(I) MINFER_D16(I), MINFER_D16(I + 16)
#define MINFER_D64(I) MINFER_D32(I), MINFER_D32(I + 32)
// A, B, ADD and TB are placeholders: the operands that follow the registers of D.
#define MINFER_WGMMA(N, TYPES, REGISTERS, A, B, ADD, TB, ...)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" REGISTERS "}, " A ", " B                   \
               ", add, 1, 1, 0, " TB ";\n}"                                                                      \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransposedB)))
#define MINFER_WGMMA_N(TYPES)                                                                                    \
  if constexpr (kRegisters == 128)                                                                               \
    MINFER_WGMMA(256, TYPES, MINFER_REGISTERS_128, "%128", "%129", "%130", "%131",                               \
                 MINFER_D64(0), MINFER_D64(64));                                                                 \
  else if constexpr (kRegisters == 112)                                                                          \
    MINFER_WGMMA(224, TYPES, MINFER_REGISTERS_112, "%112", "%113", "%114", "%115",                               \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D16(96));                                                 \
  else if constexpr (kRegisters == 96)                                                                           \
    MINFER_WGMMA(192, TYPES, MINFER_REGISTERS_96, "%96", "%97", "%98", "%99", MINFER_D64(0), MINFER_D32(64));    \
  else if constexpr (kRegisters == 64)                                                                           \
    MINFER_WGMMA(128, TYPES, MINFER_REGISTERS_64, "%64", "%65", "%66", "%67", MINFER_D64(0));                    \
  else if constexpr (kRegisters == 56)                                                                           \
    MINFER_WGMMA(112, TYPES, MINFER_REGISTERS_56, "%56", "%57", "%58", "%59",                                    \
                 MINFER_D32(0), MINFER_D16(32), MINFER_D8(48));                                                  \
  else if constexpr (kRegisters == 48)                                                                           \
    MINFER_WGMMA(96, TYPES, MINFER_REGISTERS_48, "%48", "%49", "%50", "%51", MINFER_D32(0), MINFER_D16(32));     \
  else if constexpr (kRegisters == 32)                                                                           \
    MINFER_WGMMA(64, TYPES, MINFER_REGISTERS_32, "%32", "%33", "%34", "%35", MINFER_D32(0));                     \
  else if constexpr (kRegisters == 24)                                                                           \
    MINFER_WGMMA(48, TYPES, MINFER_REGISTERS_24, "%24", "%25", "%26", "%27", MINFER_D16(0), MINFER_D8(16));      \
  else if constexpr (kRegisters == 16)                                                                           \
    MINFER_WGMMA(32, TYPES, MINFER_REGISTERS_16, "%16", "%17", "%18", "%19", MINFER_D16(0));                     \
  else                                                                                                           \
    static_assert(kRegisters == 0, "add its registers above")

// d = a b, or d += a b: 64 x 2 kRegisters of the product, 16 steps in k. a and b are descriptors; a transposed b has its k
// in rows, and is kept as they are. Element i of a thread's d is in row 16 warp + lane / 4, and 8 more for i % 4 >= 2, and
// column 8 (i / 4) + 2 (lane % 4) + i % 2, with the warp's number in the warpgroup.
template <typename T, bool kTransposedB, int kRegisters>
__device__ inline void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    MINFER_WGMMA_N("f32.f16.f16");
  } else {
    MINFER_WGMMA_N("f32.bf16.bf16");
  }
}

// --- Warpgroups and clusters ----------------------------------------------------------------------------------------

// The number of this thread's warpgroup, known to be the same in a warp.
__device__ inline int warpgroup_index() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

// A barrier of some of a block's warps, of kThreads threads, where it has no others that call it.
template <int kThreads = 128>
__device__ inline void warps_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// All warps of a warpgroup give up, or wait for, registers until a thread has that many.
template <int kRegisters>
__device__ inline void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// This block's number in its cluster.
__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster, which flushes no caches: no thread reads what another wrote, except barriers
// behind their fence. Not .aligned: lanes of a warp may come one after the other.
__device__ inline void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// --- Flags in global memory, by which blocks that run at once tell each other something ----------------------------

// Raised by one thread, when all of the GPU can see what it wrote, and what threads wrote that it has met at a barrier.
__device__ inline void flag_raise(unsigned* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// One thread waits until it is raised, and takes it down.
__device__ inline void flag_take(unsigned* flag) {
  unsigned raised;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  } while (!raised);
  *flag = 0;
}

// Counters of how far others are, which tell nothing of what they wrote.
__device__ inline void counter_add(unsigned* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned counter_read(const unsigned* counter) {
  unsigned count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// --- On the host ----------------------------------------------------------------------------------------------------

// cuTensorMapEncodeTiled, null if the driver has none. The driver is asked for it, so that nothing links it: a machine that
// builds has none.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  return std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// How TMA finds boxes of box_rows x box_cols, 256 at most, in a row-major matrix of rows x cols 16-bit elements, ld apart;
// false when the driver refuses. `span` is the swizzle, 32, 64 or 128 bytes, or 0 for none; the rows of a swizzled box are no
// longer than that. Left out, it is 128 for boxes with rows of 128 bytes and else none.
template <typename T>
bool make_tensor_map(TensorMap& map, const T* matrix, int rows, int cols, int64_t ld, int box_rows, int box_cols,
                     int span = -1) {
  const auto encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {cuuint64_t(cols), cuuint64_t(rows)}, strides[] = {cuuint64_t(ld) * sizeof(T)};
  const cuuint32_t box[] = {cuuint32_t(box_cols), cuuint32_t(box_rows)}, steps[] = {1, 1};
  if (span < 0) span = box_cols == 64 ? 128 : 0;
  const auto swizzle = span == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : span == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : span == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                    : CU_TENSOR_MAP_SWIZZLE_NONE;
  // With promotion to 256 bytes, what is read once came 1 to 2 % later, and what is read often no sooner.
  return encode && encode(&map, tensor_map_type<T>(), 2, const_cast<T*>(matrix), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A launch of `blocks` blocks, whose x is a multiple of `cluster`, in clusters of that many along x.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int cluster, dim3 blocks, int threads, int shared, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into it
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared,
                            cudaStream_t stream, const Arguments&... arguments) {
  const ClusterLaunch launch(cluster, blocks, threads, shared, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

// How many clusters run at once; fewer than multiprocessors / cluster where a part of the GPU has a few too many. The
// driver is asked once.
template <typename Kernel>
cudaError_t clusters_at_once(int* clusters, Kernel* kernel, int cluster, int threads, int shared) {
  static std::mutex mutex;
  static std::map<std::tuple<Kernel*, int, int>, int> known;  // by device, too
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = known.try_emplace({kernel, cluster, device}, 0);
  if (is_new) {
    const ClusterLaunch launch(cluster, cluster, threads, shared, nullptr);
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&found->second, kernel, &launch.config);
        error != cudaSuccess) {
      known.erase(found);
      return error;
    }
  }
  *clusters = found->second;
  return cudaSuccess;
}

}  // namespace minfer
