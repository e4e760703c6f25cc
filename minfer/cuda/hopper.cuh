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
// A barrier's phase ends when `arrivals` threads have arrived and the expected bytes have been written. A wait names the parity
// of a phase, 0 for the first, and returns when that phase has ended; it returns at once if the phase before the present one
// has that parity.

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After barrier_init and before the block-wide barrier: other threads, blocks and the copy engine then see the barriers.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and expects that many bytes in this phase.
__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the same barrier of another block of the cluster. It does not publish what the thread wrote: a release for the
// cluster would cost a MEMBAR.GPU, and a thread that has only read a stage has nothing to publish.
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
// Copies boxes of a matrix between global memory and shared memory, where the rows of a box are contiguous. If a row is 128
// bytes long, the 16-byte pieces of row r are in the order i ^ (r % 8): the 128-byte swizzle. Its boxes start at multiples of
// 1024 bytes, others at multiples of 128 (tools/print_swizzle.py prints all swizzles). What is outside of the matrix is read as
// zero and not written. x counts columns, y rows.

using TensorMap = CUtensorMap;

// Prefetches the tensor map, which is in memory too.
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

// The same to each block of the cluster whose bit is in `blocks`: to the same place in its shared memory, with the bytes
// counted at its own barrier.
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

// A thread calls it once it knows that ordinary writes of others to global memory are done: the copies that it then starts see
// them.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The copy engine and wgmma see after it what ordinary writes put in shared memory before it.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void tma_store(const TensorMap& map, const void* box, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(box)), "r"(x), "r"(y)
               : "memory");
}

// Closes the group of this thread's stores since the last one.
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the copy engine has read shared memory for all but the kPending youngest groups of this thread.
template <int kPending>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Writes four 8x8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i. The fragments are laid out
// as ldmatrix_x4 returns them.
__device__ inline void stmatrix_x4(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// The same, each matrix transposed: its columns become the rows that the lanes address.
__device__ inline void stmatrix_x4_transposed(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// --- Products of a warpgroup ----------------------------------------------------------------------------------------

// Describes a tile in the 128-byte swizzle to wgmma. Bits 0-13 hold its address, 16-29 the leading and 32-45 the stride offset,
// all in units of 16 bytes, and 62-63 the swizzle. The tile is made of groups of 8 rows of 128 bytes, `stride` bytes apart. A
// row is 64 steps in k; of a transposed B it is 64 columns at one k, and the next 64 columns are `leading` bytes further
// ("Strides" in "Shared Memory Matrix Layout"; otherwise the leading offset is not used).
__device__ inline uint64_t tile_descriptor(const void* tile, int leading, int stride) {
  return uint64_t((shared_address(tile) & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
         uint64_t{1} << 62;
}

// Orders accesses to the accumulators' registers; needed before the first product that adds to values that a thread wrote.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the warpgroup's products since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the youngest groups are in flight; the older ones have then read shared memory.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Waits for all groups, after which the thread may read its accumulators; the compiler moves no such read before it.
template <int kM, int kN>
__device__ inline void wgmma_finish(float (&d)[kM][kN]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kM * kN; ++i) asm volatile("" : "+f"(d[i / kN][i % kN])::"memory");
}

#define MINFER_10(I) "%" #I "0,%" #I "1,%" #I "2,%" #I "3,%" #I "4,%" #I "5,%" #I "6,%" #I "7,%" #I "8,%" #I "9,"
#define MINFER_REGISTERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MINFER_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MINFER_REGISTERS_24 MINFER_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MINFER_REGISTERS_30 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," MINFER_10(1) MINFER_10(2)
#define MINFER_REGISTERS_32 MINFER_REGISTERS_30 "%30,%31"
#define MINFER_REGISTERS_48 MINFER_REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MINFER_REGISTERS_56 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) "%50,%51,%52,%53,%54,%55"
#define MINFER_REGISTERS_64 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) "%60,%61,%62,%63"
#define MINFER_REGISTERS_40 MINFER_REGISTERS_30 "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define MINFER_REGISTERS_70 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6)
#define MINFER_REGISTERS_72 MINFER_REGISTERS_70 "%70,%71"
#define MINFER_REGISTERS_80 MINFER_REGISTERS_70 "%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
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
// A, B, ADD and TB are placeholders: the operands that follow the registers of D. TYPES begins with the k of the instruction.
// fp8 has no transposed operands, so its ORDER leaves TB out.
#define MINFER_WGMMA_ORDER(TB) ", 0, " TB
#define MINFER_WGMMA_NO_ORDER(TB) ""
#define MINFER_WGMMA(N, TYPES, ORDER, REGISTERS, A, B, ADD, TB, ...)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" REGISTERS "}, " A ", " B                   \
               ", add, 1, 1" ORDER(TB) ";\n}"                                                                      \
               : __VA_ARGS__                                                                                     \
               : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransposedB)))
#define MINFER_WGMMA_N(TYPES, ORDER)                                                                                    \
  if constexpr (kRegisters == 128)                                                                               \
    MINFER_WGMMA(256, TYPES, ORDER, MINFER_REGISTERS_128, "%128", "%129", "%130", "%131",                               \
                 MINFER_D64(0), MINFER_D64(64));                                                                 \
  else if constexpr (kRegisters == 112)                                                                          \
    MINFER_WGMMA(224, TYPES, ORDER, MINFER_REGISTERS_112, "%112", "%113", "%114", "%115",                               \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D16(96));                                                 \
  else if constexpr (kRegisters == 96)                                                                           \
    MINFER_WGMMA(192, TYPES, ORDER, MINFER_REGISTERS_96, "%96", "%97", "%98", "%99", MINFER_D64(0), MINFER_D32(64));    \
  else if constexpr (kRegisters == 80)                                                                          \
    MINFER_WGMMA(160, TYPES, ORDER, MINFER_REGISTERS_80, "%80", "%81", "%82", "%83", MINFER_D64(0), MINFER_D16(64));\
  else if constexpr (kRegisters == 72)                                                                          \
    MINFER_WGMMA(144, TYPES, ORDER, MINFER_REGISTERS_72, "%72", "%73", "%74", "%75", MINFER_D64(0), MINFER_D8(64));\
  else if constexpr (kRegisters == 64)                                                                           \
    MINFER_WGMMA(128, TYPES, ORDER, MINFER_REGISTERS_64, "%64", "%65", "%66", "%67", MINFER_D64(0));                    \
  else if constexpr (kRegisters == 56)                                                                           \
    MINFER_WGMMA(112, TYPES, ORDER, MINFER_REGISTERS_56, "%56", "%57", "%58", "%59",                                    \
                 MINFER_D32(0), MINFER_D16(32), MINFER_D8(48));                                                  \
  else if constexpr (kRegisters == 48)                                                                           \
    MINFER_WGMMA(96, TYPES, ORDER, MINFER_REGISTERS_48, "%48", "%49", "%50", "%51", MINFER_D32(0), MINFER_D16(32));     \
  else if constexpr (kRegisters == 40)                                                                          \
    MINFER_WGMMA(80, TYPES, ORDER, MINFER_REGISTERS_40, "%40", "%41", "%42", "%43", MINFER_D32(0), MINFER_D8(32));\
  else if constexpr (kRegisters == 32)                                                                           \
    MINFER_WGMMA(64, TYPES, ORDER, MINFER_REGISTERS_32, "%32", "%33", "%34", "%35", MINFER_D32(0));                     \
  else if constexpr (kRegisters == 24)                                                                           \
    MINFER_WGMMA(48, TYPES, ORDER, MINFER_REGISTERS_24, "%24", "%25", "%26", "%27", MINFER_D16(0), MINFER_D8(16));      \
  else if constexpr (kRegisters == 16)                                                                           \
    MINFER_WGMMA(32, TYPES, ORDER, MINFER_REGISTERS_16, "%16", "%17", "%18", "%19", MINFER_D16(0));                     \
  else if constexpr (kRegisters == 8)                                                                           \
    MINFER_WGMMA(16, TYPES, ORDER, MINFER_REGISTERS_8, "%8", "%9", "%10", "%11", MINFER_D8(0));                 \
  else                                                                                                           \
    static_assert(kRegisters == 0, "add its registers above")

// d = a b, or d += a b: 64 x 2 kRegisters of the product, 16 steps in k. a and b are descriptors; a transposed b has one k in
// each row of shared memory. Element i of a thread's d is in row 16 warp + lane / 4, plus 8 for i % 4 >= 2, and in column 8 (i
// / 4) + 2 (lane % 4) + i % 2, where warp is the warp's number in the warpgroup. With E4M3Pair the 16 steps are 32 numbers in
// k.
template <typename T, bool kTransposedB, int kRegisters>
__device__ inline void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, E4M3Pair>) {
    static_assert(!kTransposedB);
    MINFER_WGMMA_N("k32.f32.e4m3.e4m3", MINFER_WGMMA_NO_ORDER);
  } else if constexpr (std::is_same_v<T, __half>) {
    MINFER_WGMMA_N("k16.f32.f16.f16", MINFER_WGMMA_ORDER);
  } else {
    MINFER_WGMMA_N("k16.f32.bf16.bf16", MINFER_WGMMA_ORDER);
  }
}

// --- Warpgroups and clusters ----------------------------------------------------------------------------------------

// The number of this thread's warpgroup, known to be the same in a warp.
__device__ inline int warpgroup_index() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }

// A barrier of kThreads threads of a block, whole warps. No other warps of the block may use it.
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

// A barrier of all threads of the cluster that orders no writes: threads may rely on no data of others after it, except on
// barriers that were initialised before their fence. Not .aligned: the lanes of a warp may arrive one after the other.
__device__ inline void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// --- Flags in global memory, by which blocks that run at once signal each other ------------------------------------

// One thread raises it. The whole GPU then sees what this thread wrote, and what threads wrote before a barrier with it.
__device__ inline void flag_raise(unsigned* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// One thread waits until it is raised, and clears it.
__device__ inline void flag_take(unsigned* flag) {
  unsigned raised;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  } while (!raised);
  *flag = 0;
}

// Progress counters of other blocks. They order no data.
__device__ inline void counter_add(unsigned* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned counter_read(const unsigned* counter) {
  unsigned count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// --- On the host ----------------------------------------------------------------------------------------------------

// cuTensorMapEncodeTiled, or null if the driver does not have it. It is looked up at run time, so that nothing links the
// driver, which a machine that only builds does not have.
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

// The tensor map for boxes of box_rows x box_cols, 256 each at most, of a row-major matrix of rows x cols 16-bit elements,
// whose rows are ld apart; false when the driver refuses. `span` is the swizzle, 32, 64 or 128 bytes, or 0 for none; a row of a
// swizzled box is at most that long. The default is 128 for boxes with rows of 128 bytes, and none for others.
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
  // With promotion to 256 bytes, data that is read once arrived 1 to 2 % later, and data that is read often no sooner.
  return encode && encode(&map, tensor_map_type<T>(), 2, const_cast<T*>(matrix), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A launch of `blocks` blocks, whose x is a multiple of `cluster`, in clusters of that many along x.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int cluster, dim3 blocks, int threads, int shared, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into it
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared,
                            cudaStream_t stream, const Arguments&... arguments) {
  const ClusterLaunch launch(cluster, blocks, threads, shared, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

// The same as a cooperative launch: all clusters start at once, so that their blocks may wait for each other, or it fails.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters_together(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared,
                                     cudaStream_t stream, const Arguments&... arguments) {
  ClusterLaunch launch(cluster, blocks, threads, shared, stream);
  launch.config.numAttrs = 2;
  return cudaLaunchKernelEx(&launch.config, kernel, arguments...);
}

// How many clusters run at once. It is fewer than SMs / cluster where the SMs of a part of the GPU are not a multiple of the
// cluster. The driver is asked once.
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
