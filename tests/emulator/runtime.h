// CUDA's execution model on one CPU thread, so that a kernel's result is proven without a GPU. It is stricter than
// hardware wherever hardware leaves something undefined, and slow; it says nothing of time.
//
// Clusters, each of one block unless a launch says more, run one after the other, or all at once where few of them are
// launched as clusters. Each thread of those that run is a fiber,
// which runs until it waits: for the block at __syncthreads(), or for its warp at an operation of all lanes. Who runs
// next is drawn anew at each barrier, from a seed, so that what relies on an order that nothing enforces comes out
// wrong. What hardware does on its own, as Hopper's copy engine, happens at any time between. Shared memory is full of NaN when a block
// starts. Operands and shared arrays lie between pages that cannot be touched, operands that are not to be written in
// pages that cannot. Index and alignment of what the compiler sees are checked by its sanitizers, whose handlers are here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace emulator {

constexpr size_t kPage = 4096, kGuard = 1 << 20, kMostThreads = 1024, kMostCluster = 8;
constexpr size_t kStack = (128 << 10) + 9 * 64;  // not a power of two, or all stacks would map to the same cache sets
constexpr unsigned kWarp = 32, kWarpgroup = 128;
constexpr size_t kDefaultShared = 48 << 10;

// What the GPU has. Not inline: of inline variables a process has one for all libraries, and these are a library's own.
// The most shared memory of a block: on sm_86 and sm_89, the least of all that kernels are written for, unless the
// kernel is for one architecture alone. So few SMs that small problems have more tiles than blocks that run at once,
// and fewer.
extern size_t most_shared;
extern int multiprocessors;

// Which of the mistakes that a test has put into the kernel's sources is made; 0 is none.
extern int mistake;

inline int attribute_of_gpu(cudaDeviceAttr attribute) {
  if (attribute == cudaDevAttrMultiProcessorCount) return multiprocessors;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) return static_cast<int>(most_shared);
  if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor) return static_cast<int>(most_shared) + 1024;
  if (attribute == cudaDevAttrClockRate) return 2'520'000;  // kHz; this and the next two are of an L40S
  if (attribute == cudaDevAttrMemoryClockRate) return 9'001'000;
  if (attribute == cudaDevAttrGlobalMemoryBusWidth) return 384;
  throw std::runtime_error("asks for attribute " + std::to_string(attribute) + " of the GPU, which it has not");
}

inline size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Memory full of NaN between two guards that cannot be touched; it touches the one behind it, up to a multiple of
// `unit`, or the one before it.
class Region {
 public:
  Region(std::string name, size_t bytes, bool at_end = true, size_t unit = 16) : name(std::move(name)) {
    inner_ = round_up(std::max<size_t>(bytes, 1), kPage);
    map_ = static_cast<char*>(mmap(nullptr, inner_ + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    protect(PROT_READ | PROT_WRITE);
    begin = map_ + kGuard + (at_end ? inner_ - round_up(bytes, unit) : 0), end = begin + bytes;
    poison();
  }
  ~Region() { munmap(map_, inner_ + 2 * kGuard); }
  Region(const Region&) = delete;

  void poison() { memset(map_ + kGuard, 0xff, inner_); }
  void protect(int rights) { mprotect(map_ + kGuard, inner_, rights); }
  bool contains(const void* p, size_t bytes) const { return p >= begin && static_cast<const char*>(p) + bytes <= end; }
  bool near(const void* p) const { return p >= map_ && p < map_ + inner_ + 2 * kGuard; }
  bool intact() const {  // whether the slack around it, there for its alignment, is as it was
    const auto poisoned = [](char byte) { return byte == '\xff'; };
    return std::all_of(map_ + kGuard, begin, poisoned) && std::all_of(end, map_ + kGuard + inner_, poisoned);
  }

  const std::string name;
  char *begin, *end;

 private:
  char* map_;
  size_t inner_;
};

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};

struct NamedBarrier {
  unsigned arrived = 0;
  std::vector<struct Thread*> waiting;
};

// A block that is running.
struct Block {
  uint3 index;
  unsigned number, rank;  // of those that run, and in its cluster
  unsigned at_barrier, at_cluster_barrier, ended;  // threads; at the cluster's, of the cluster, in its first block
  std::vector<struct Thread*> at_barrier_of_warps;
  std::map<int, NamedBarrier> named;  // by number
  std::vector<unsigned> asked;        // registers per thread that each warpgroup has requested (setmaxnreg)
  std::map<int, std::unique_ptr<Region>> shared;  // by declaration; -1 is the dynamic one

  Region* find(const void* p, size_t bytes) const {
    for (const auto& [id, region] : shared)
      if (region->contains(p, bytes)) return region.get();
    return nullptr;
  }
};

// What hardware does on its own, some time after a thread has started it.
struct Transfer {
  std::function<void()> work;
  bool done = false;
};

struct Barrier {  // in shared memory
  int arrivals, left;
  int64_t bytes = 0;  // expected and not yet written
  unsigned phase = 0;
  bool of_cp_async = false;  // whether copies by cp.async arrive at it, which are ordinary writes
  std::vector<struct Thread*> waiting;
};

struct Product {  // of a warpgroup, in flight
  unsigned group, lanes_left;
  std::function<bool()> unchanged;  // whether shared memory has the operands that were multiplied
};

struct Sums {  // a thread's registers that products in flight add to
  std::vector<float> values;
  unsigned group;  // of the last product
};

struct Thread {
  Block* block;
  uint3 index;
  unsigned rank, number;  // in its block, and of all that run
  jmp_buf context;
  bool started = false, ended = false;
  const char* waits = nullptr;
  std::vector<Copy> open;                // cp.async since the last commit
  std::list<std::vector<Copy>> groups;   // committed, oldest first; an empty list allocates nothing
  std::vector<std::pair<const char*, const char*>> unfenced;  // written for the copy engine, with no fence since
  std::vector<std::shared_ptr<Transfer>> stores;              // of the copy engine, since the last commit
  std::list<std::vector<std::shared_ptr<Transfer>>> store_groups;
  std::map<float*, Sums> sums;
  unsigned product_groups = 0;  // committed
  size_t products_done = 0;     // of its warpgroup's
  bool fenced = false;
  bool acquired = false;  // what others wrote, with no fence for the copy engine since
  bool acquired_copies = false;  // what cp.async wrote to shared memory, with no fence for wgmma since
};

struct Warp {  // or a warpgroup
  unsigned arrived = 0;
  const char* what = nullptr;
  void* operands[kWarpgroup];
  std::vector<Product> products;  // of a warpgroup
};

// A stack, on which threads run one after another. Only the first needs getcontext and setcontext, which are system calls.
struct Fiber {
  bool prepared = false;
  jmp_buf next_thread;
};

// The launch that is running; there is one at a time.
struct State {
  std::mt19937 random;
  unsigned call = 0;  // the number that it was seeded with
  dim3 grid, block;
  std::vector<Block> blocks;  // that run: one or more clusters
  unsigned cluster;           // blocks of one
  std::vector<Thread> threads;
  unsigned of_block = 0;  // threads of one block
  unsigned registers = 0;  // per thread, which the launch gives
  std::vector<Warp> warps, warpgroups;
  std::vector<Thread*> ready;  // run from the back
  unsigned slow_from = 0, slow_to = 0;  // threads that run when no other can: none, a warp, a block, or a cluster
  bool slowest = false;                 // and when nothing is in flight either
  unsigned pace = 1;  // how many threads run for one transfer that ends
  std::vector<std::shared_ptr<Transfer>> transfers;  // in flight
  std::map<const void*, Barrier> barriers;
  std::map<const void*, std::vector<Thread*>> at_flags;
  Thread* current = nullptr;
  const std::function<void()>* body = nullptr;
  std::vector<Region*> operands;
  std::deque<Region> scratch;  // that the call has allocated
  std::deque<Region> counters;  // that calls have allocated with cudaMalloc
  unsigned long long capture = 0;  // of a CUDA graph, on all streams; 0 is none
  cudaError_t of_capture = cudaSuccess;  // what CUDA answers to a question about captures
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  size_t shared_allowed = kDefaultShared;
  char* stacks = nullptr;
  std::unique_ptr<Fiber[]> fibers;  // one for each stack
  sigjmp_buf scheduler;
  std::string error;
};

extern State state;

// Ends the launch, with a sentence. Fibers cannot be unwound, so this jumps.
[[noreturn]] void fail(const std::string& what);

// Lets others run until this thread is released; `what` is for the error if it never is.
void suspend();
void wait_for(const char* what);

// Makes threads runnable: before or after those that are, one warp after the other or all mixed.
void release(std::vector<Thread*> threads);

void barrier();
void cluster_barrier();

// A thread's warp, or warpgroup, of a block that may end with a part of one.
inline Warp& group_of(const Thread& thread, unsigned lanes) {
  const unsigned groups = (state.of_block + lanes - 1) / lanes;
  return (lanes == kWarp ? state.warps : state.warpgroups)[thread.block->number * groups + thread.rank / lanes];
}

// Where a thread's warp, or warpgroup, meets for an operation of all its lanes: the last one to come is given what each
// lane brought, and lets the others go on; those wait, and are given null.
void** gather(const char* what, void* mine, unsigned lanes);
void release_others(unsigned lanes);

// An operation of a whole warp, or warpgroup: when the last lane has come, it does `work` on the operands of all.
template <unsigned kLanes = kWarp, typename Operands, typename Work>
void collective(const char* what, Operands& mine, Work work) {
  void** all = gather(what, &mine, kLanes);
  if (!all) return;
  work(reinterpret_cast<Operands**>(all));
  release_others(kLanes);
}

struct Launch {
  Launch(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) : grid(grid), block(block), shared(shared) {}
  dim3 grid, block;
  size_t shared;
  unsigned cluster = 1;   // blocks, in x
  bool together = false;  // whether all run at once, if they are few
};

void launch(const Launch& how, const std::function<void()>& body);

// A launch of a kernel with arguments that were evaluated once, before it.
template <typename Kernel, typename Arguments>
void launch_with(const Launch& how, Kernel kernel, const Arguments& arguments) {
  launch(how, [&] { std::apply(kernel, arguments); });
}

// Of SIGSEGV and SIGBUS while a call runs: says whose guards, or which read-only operand, a kernel touched.
void on_signal(int, siginfo_t* info, void*);

// Memory

template <typename Array>
Array& shared(int declaration, const char* name) {
  auto& region = state.current->block->shared[declaration];
  if (!region) region = std::make_unique<Region>(std::string("shared array ") + name, sizeof(Array));
  return *reinterpret_cast<Array*>(region->begin);
}

inline char* dynamic_shared() { return state.current->block->shared[-1]->begin; }

// C += A B of one mma.m16n8k16. It is in runtime.cpp, which is compiled with optimisation.
void multiply_add(double (&C)[16][8], const double (&A)[16][16], const double (&B)[16][8]);

// Fail if the launch has larger blocks than a kernel's __launch_bounds__ say, for which the compiler keeps enough registers; or
// larger ones than there are registers for when a thread has as many as __maxnreg__ says, or 255 where neither is stated.
void within_bounds(int most, int blocks = 1, int = 0);
void has_registers(int of_thread);

// A warpgroup requests so many registers for each of its threads. When every warpgroup of the block has requested, this fails if
// the sum exceeds the registers of the launch: on a GPU the last setmaxnreg would wait for ever.
void ask_for_registers(unsigned of_thread);

// Fail unless an operation may touch that many bytes of shared memory, or of an operand, at a multiple of them.
void check_shared(const char* what, const void* p, size_t bytes);
void check_global(const char* what, const void* p, size_t bytes);

}  // namespace emulator

// What a kernel's source says. Launches and declarations of shared memory are rewritten before (see __init__.py).
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __CUDACC__
#define threadIdx (emulator::state.current->index)
#define blockIdx (emulator::state.current->block->index)
#define blockDim (emulator::state.block)
#define gridDim (emulator::state.grid)

inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline unsigned min(unsigned a, unsigned b) { return std::min(a, b); }
inline unsigned max(unsigned a, unsigned b) { return std::max(a, b); }
inline uint64_t min(uint64_t a, uint64_t b) { return std::min(a, b); }
inline uint64_t max(uint64_t a, uint64_t b) { return std::max(a, b); }

inline void __syncthreads() { emulator::barrier(); }

inline void __syncwarp(unsigned mask = ~0u) {
  if (mask != ~0u) emulator::fail("calls __syncwarp() for a part of its warp, which the emulator does not know");
  emulator::collective("__syncwarp()", mask, [](unsigned**) {});
}

// Each lane's value; lane i gets that of the lane that its source(i) names.
template <typename T, typename Source>
T emulator_shuffle(const char* what, T value, Source source) {
  struct Operands {
    T value, result;
    Source source;
  } mine{value, value, source};
  emulator::collective(what, mine, [](Operands** lanes) {
    for (unsigned i = 0; i < emulator::kWarp; ++i)
      lanes[i]->result = lanes[lanes[i]->source(i) % emulator::kWarp]->value;
  });
  return mine.result;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator_shuffle("__shfl_sync()", value, [=](unsigned) { return unsigned(lane); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator_shuffle("__shfl_xor_sync()", value, [=](unsigned lane) { return lane ^ mask; });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
  return emulator_shuffle("__shfl_down_sync()", value, [=](unsigned i) { return i + by < 32 ? i + by : i; });
}

template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
  return emulator_shuffle("__shfl_up_sync()", value, [=](unsigned i) { return i >= by ? i - by : i; });
}

// What all lanes get of the values of all: combine(values).
template <typename T, typename Combine>
T emulator_vote(const char* what, T value, Combine combine) {
  struct Operands {
    T value, result;
  } mine{value, value};
  emulator::collective(what, mine, [&](Operands** lanes) {
    T values[emulator::kWarp];
    for (unsigned i = 0; i < emulator::kWarp; ++i) values[i] = lanes[i]->value;
    const T result = combine(values);
    for (unsigned i = 0; i < emulator::kWarp; ++i) lanes[i]->result = result;
  });
  return mine.result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulator_vote("__reduce_max_sync()", value, [](auto& all) { return *std::max_element(all, all + 32); });
}
inline unsigned __ballot_sync(unsigned, bool is) {
  return emulator_vote("__ballot_sync()", unsigned(is), [](auto& all) {
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; ++i) bits |= all[i] << i;
    return bits;
  });
}

template <typename T>
T __ldcs(const T* p) {  // evicted first; the value is the same
  return *p;
}

template <typename T>
T __ldcg(const T* p) {
  return *p;
}

template <typename T>
T __ldg(const T* p) {
  return *p;
}

template <typename T>
void __stcg(T* p, T value) {
  *p = value;
}

template <typename T>
void __stcs(T* p, T value) {
  *p = value;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f ? 0.0f : a / b; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

// Threads run one at a time, and blocks one after the other, so that an operation is atomic and memory in order.
inline void __threadfence() {}
inline unsigned atomicInc(unsigned* p, unsigned last) {
  const unsigned before = *p;
  *p = before >= last ? 0 : before + 1;
  return before;
}
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  const T before = *p;
  *p += value;
  return before;
}

// Selects four of the eight bytes of y and x, by the digits of `selector`.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

// a b + c of both halves, rounded once; the toolkit has it for the device only.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto one = [](__half x, __half y, __half z) { return __double2half(double(float(x)) * float(y) + float(z)); };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto one = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return __double2bfloat16(double(float(x)) * float(y) + float(z));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}

#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = emulator::attribute_of_gpu(attribute), cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, ...) (*(blocks) = 2, cudaSuccess)

// Work on a stream is done at once. What is not allowed during captures is refused then, except in the relaxed mode.
#define cudaGetLastError() (emulator::state.of_capture = cudaSuccess)
#define cudaStreamGetCaptureInfo(stream, status, id) emulator::find_capture(status, id)

namespace emulator {
inline cudaError_t find_capture(cudaStreamCaptureStatus* status, unsigned long long* id) {
  *status = state.capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, *id = state.capture;
  return state.of_capture;
}
inline cudaError_t outside_captures() {
  const bool is_relaxed = state.capture_mode == cudaStreamCaptureModeRelaxed;
  return state.capture && !is_relaxed ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
}  // namespace emulator

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, emulator::state.capture_mode);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return emulator::outside_captures();
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return emulator::outside_captures(); }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return emulator::outside_captures(); }
inline cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = emulator::state.counters.emplace_back("counters", bytes).begin;
  return emulator::outside_captures();
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}

template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > emulator::most_shared) return cudaErrorInvalidValue;
  emulator::state.shared_allowed = value;
  return cudaSuccess;
}
