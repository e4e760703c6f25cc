// What the device can do at best: kernels that do nothing but copy, read, or multiply. `peaks.py` times them.
//
// The multiplications need operands like those of a real product, because power, and with it the clock, depends on the
// bits that toggle: on a power-limited card zeros run faster than anything that a real kernel can reach. So operands
// come from a tensor of normally distributed numbers, successive instructions have different operands, and the second
// half of each iteration subtracts what the first half added, so that sums stay as large as a real product's
// (magnitude about 10) for any number of iterations, and are neither infinite nor denormal.
//
// An operation's dtypes are its tensors': `operands` has the inputs', `sink` the accumulator's. Each thread writes the
// sum of its accumulators to `sink`, of shape (blocks, 256), so that nothing can be optimised away and a result can
// be looked at. FLOPs and bytes are counted in `peaks.py`.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <climits>
#include <cstdint>
#include <type_traits>

namespace minfer::peaks {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;                    // of every kernel here
constexpr int kLoads = 4;                        // 16-byte loads that a thread has in flight
constexpr int kChunk = kThreads * kLoads;        // 16-byte words that a block moves at a time
constexpr int kTileWords = (2 * 64 + 256) * 32;  // of wgmma's operands: two tiles of A and one of B, 128 bytes deep

// The sign bits of a word of operands: of two half-precision numbers, or of four of e4m3.
template <typename T>
constexpr uint32_t kSigns = sizeof(T) == 2 ? 0x80008000u : 0x80808080u;

// --- Bandwidth ------------------------------------------------------------------------------------------------------
// 2048 threads with 16 bytes each keep 32 KiB in flight on an SM, with 64 bytes 128 KiB; an H200 needs about 36 KiB for its
// 4.8 TB/s at 1 us.
// Accesses are ordinary ones: with evict-first hints a cache may keep the start of a buffer that is read over and over.

// A block copies one chunk and ends. On an H100, 1024 threads with a word each copy 6 GB at 3063 GB/s, 256 threads with four
// words at 2995, and blocks that stay and loop over chunks at 2846. Of 64 MB, four words a thread are the fastest (3202).
template <int kWords, int kBlock>
__global__ void __launch_bounds__(kBlock) copy_chunk(uint4* out, const uint4* in) {
  static_assert(kWords * kBlock == kChunk);
  const int64_t first = int64_t{blockIdx.x} * kChunk + threadIdx.x;
  uint4 word[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) word[i] = in[first + i * kBlock];
#pragma unroll
  for (int i = 0; i < kWords; ++i) out[first + i * kBlock] = word[i];
}

__global__ void __launch_bounds__(kThreads) read_chunks(uint32_t* sink, const uint4* in, int64_t chunks) {
  uint32_t parity = 0;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t first = chunk * kChunk + threadIdx.x;
    uint4 word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) word[i] = in[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) parity ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
  }
  if (parity == 0x5eed1e55u) *sink = parity;  // one thread in 4 billion writes, and the compiler cannot know that
}

// --- Accumulators ---------------------------------------------------------------------------------------------------

// A register of accumulators: one float, or two halves.
template <typename Accumulate>
using Register = std::conditional_t<std::is_same_v<Accumulate, float>, float, uint32_t>;

// The registers that hold so many accumulators of a thread.
template <typename Accumulate>
constexpr int kRegisters(int accumulators) {
  return std::is_same_v<Accumulate, float> ? accumulators : accumulators / 2;
}

// A starting value made of a word of operands. From zero, half of all sums would be the tiny rounding error that
// adding and subtracting the same product leaves.
template <typename T, typename Accumulate>
__device__ Register<Accumulate> starting(uint32_t word) {
  if constexpr (std::is_same_v<Accumulate, float>) {
    const unsigned short low = static_cast<unsigned short>(word);
    if constexpr (std::is_same_v<T, __half>)
      return __half2float(__ushort_as_half(low));
    else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(word), __NV_E4M3)));
    else
      return __bfloat162float(__ushort_as_bfloat16(low));
  } else {
    return word;
  }
}

__device__ float value(float accumulator) { return accumulator; }

__device__ float value(uint32_t accumulators) {
  return __half2float(__ushort_as_half(accumulators & 0xffff)) + __half2float(__ushort_as_half(accumulators >> 16));
}

// --- mma.sync -------------------------------------------------------------------------------------------------------
// A warp holds 4 fragments of A and 4 of B, as in a 64x32 tile of a real product, and has 16 independent
// accumulators; with two blocks an SM, 4 warps share a tensor core, so that 64 multiplications hide the latency of one.
// An instruction takes 32 bytes of each row of A: 16 numbers of half precision, or 32 of e4m3.

// Ada and consumer Blackwell multiply e4m3 in an instruction of mma.sync. For Hopper the compiler would make it of
// conversions and fp16 products, which are no peak: there it is wgmma that multiplies e4m3.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define MMA_TAKES_E4M3
#endif

template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
#ifdef MMA_TAKES_E4M3
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();  // an empty kernel would be a record
#endif
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename T>
__device__ void mma(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename T, typename Accumulate>
__global__ void __launch_bounds__(kThreads, 2) mma_loop(Accumulate* sink, const uint32_t* operands, int iterations) {
  constexpr int kCount = kRegisters<Accumulate>(4);
  uint32_t a[2][4][4], b[4][2];  // a[1] is -a[0]
  Register<Accumulate> d[4][4][kCount];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[0][i][r] = operands[(4 * i + r) * kThreads + threadIdx.x];
#pragma unroll
    for (int r = 0; r < 4; ++r) a[1][i][r] = a[0][i][r] ^ kSigns<T>;
#pragma unroll
    for (int r = 0; r < 2; ++r) b[i][r] = operands[(16 + 2 * i + r) * kThreads + threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < 16 * kCount; ++i) {
    const int tile = i / kCount, r = i % kCount;
    d[tile / 4][tile % 4][r] = starting<T, Accumulate>(a[0][tile / 4][(tile + r) % 4]);
  }

#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration)
#pragma unroll
    for (int i = 0; i < 2 * 4 * 4; ++i) mma<T>(d[i / 4 % 4][i % 4], a[i / 16][i / 4 % 4], b[i % 4]);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16 * kCount; ++i) sum += value(d[i / kCount / 4][i / kCount % 4][i % kCount]);
  sink[blockIdx.x * kThreads + threadIdx.x] = Accumulate(sum);
}

// --- wgmma (sm_90a) -------------------------------------------------------------------------------------------------
// Two warpgroups share a 256x64 tile of B, and each has its own 64x64 tile of A, like the two consumers of a 128x256
// tile of a real product. The tiles stay in shared memory, where 8 instructions an iteration go over their 4 slices of
// 32 bytes in K (16 numbers of half precision, 32 of e4m3), adding and then subtracting. 4 to 8 are always in flight.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The descriptor of a K-major tile with the 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
// Bits 0-13 hold the address, 16-29 the leading offset (unused here), 32-45 the stride between groups, all in units of
// 16 bytes, and 62-63 the swizzle (PTX ISA, "Shared memory matrix layout" and "Matrix descriptor format").
__device__ uint64_t descriptor(const void* tile) {
  const uint64_t address = __cvta_generic_to_shared(tile);
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

#define REGISTERS_0_63                                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"   \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
  "%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_64_127                                                                                         \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"   \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define IN_OUT_4(TYPE, I) "+" TYPE(d[I]), "+" TYPE(d[(I) + 1]), "+" TYPE(d[(I) + 2]), "+" TYPE(d[(I) + 3])
#define IN_OUT_16(TYPE, I) IN_OUT_4(TYPE, I), IN_OUT_4(TYPE, I + 4), IN_OUT_4(TYPE, I + 8), IN_OUT_4(TYPE, I + 12)
#define IN_OUT_64(TYPE, I) \
  IN_OUT_16(TYPE, I), IN_OUT_16(TYPE, I + 16), IN_OUT_16(TYPE, I + 32), IN_OUT_16(TYPE, I + 48)
// A, B and SIGN are placeholders: the operands that follow the registers of D. Half-precision types end with MAJOR, which
// says that A and B are K-major; e4m3 can be nothing else, and has no such operands.
#define WGMMA(TYPES, REGISTERS, A, B, SIGN, MAJOR) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"   \
  "wgmma.mma_async.sync.aligned.m64n256" TYPES " {" REGISTERS "}, " A ", " B ", add, " SIGN ", 1" MAJOR ";\n}\n"

// d += kSign * a @ b, where kSign is 1 or -1.
template <typename T, int kSign>
__device__ void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(WGMMA("k16.f32.f16.f16", REGISTERS_0_63 "," REGISTERS_64_127, "%128", "%129", "%130", ", 0, 0")
                 : IN_OUT_64("f", 0), IN_OUT_64("f", 64)
                 : "l"(a), "l"(b), "n"(kSign));
  else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
    asm volatile(WGMMA("k32.f32.e4m3.e4m3", REGISTERS_0_63 "," REGISTERS_64_127, "%128", "%129", "%130", "")
                 : IN_OUT_64("f", 0), IN_OUT_64("f", 64)
                 : "l"(a), "l"(b), "n"(kSign));
  else
    asm volatile(WGMMA("k16.f32.bf16.bf16", REGISTERS_0_63 "," REGISTERS_64_127, "%128", "%129", "%130", ", 0, 0")
                 : IN_OUT_64("f", 0), IN_OUT_64("f", 64)
                 : "l"(a), "l"(b), "n"(kSign));
}

template <typename T, int kSign>
__device__ void wgmma(uint32_t (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(WGMMA("k16.f16.f16.f16", REGISTERS_0_63, "%64", "%65", "%66", ", 0, 0")
               : IN_OUT_64("r", 0)
               : "l"(a), "l"(b), "n"(kSign));
}

// Keeps the compiler from reading, before this point, what an asynchronous instruction has yet to write.
__device__ void settle(float& d) { asm volatile("" : "+f"(d)::"memory"); }
__device__ void settle(uint32_t& d) { asm volatile("" : "+r"(d)::"memory"); }

#endif

template <typename T, typename Accumulate>
__global__ void __launch_bounds__(kThreads, 1) wgmma_loop(Accumulate* sink, const uint32_t* operands, int iterations) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // The numbers are random, so any order of them is as good as the swizzled one.
  __shared__ __align__(1024) uint32_t tiles[kTileWords];
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) tiles[i] = operands[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads through the asynchronous proxy
  __syncthreads();
  // Taken from lane 0, the warpgroup's number is known to be uniform, and descriptors stay in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint64_t a = descriptor(tiles + warpgroup * 64 * 32), b = descriptor(tiles + 2 * 64 * 32);

  constexpr int kCount = kRegisters<Accumulate>(128);
  Register<Accumulate> d[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = starting<T, Accumulate>(operands[i % 32 * kThreads + threadIdx.x]);

  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<T, 1>(d, a + 2 * k, b + 2 * k);  // a slice is 32 bytes
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<T, -1>(d, a + 2 * k, b + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) settle(d[i]);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += value(d[i]);
  sink[blockIdx.x * kThreads + threadIdx.x] = Accumulate(sum);
#else
  __trap();  // an empty kernel would be a record
#endif
}

// --- CUDA cores -----------------------------------------------------------------------------------------------------

constexpr int kSums = 16, kSteps = 8;  // independent sums a thread, and multiply-adds to each an iteration

__global__ void __launch_bounds__(kThreads) fma_loop(float* sink, const float* operands, int iterations) {
  const float factor = 0.5f * operands[threadIdx.x % 32], term = operands[32 + threadIdx.x % 32];
  float d[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) d[i] = operands[64 + i * kThreads + threadIdx.x];
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kSums; ++i) d[i] = fmaf(d[i], factor, term);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum += d[i];
  sink[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// --- The torch ops --------------------------------------------------------------------------------------------------

cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
  return static_cast<cudaStream_t>(stream);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// As many blocks as the device holds at once.
template <typename Kernel>
int full_grid(Kernel kernel) {
  int blocks = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0));
  return blocks * attribute(cudaDevAttrMultiProcessorCount);
}

int64_t chunks(const Tensor& tensor) {
  const int64_t bytes = 4 * tensor.numel();
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous() && bytes % (kChunk * 16) == 0,
                  "peaks: buffers must be contiguous, int32, and a multiple of ", kChunk * 16, " bytes long");
  return bytes / (kChunk * 16);
}

// `words`: how many 16-byte words a thread copies, 1 or 4.
void peak_copy(Tensor out, const Tensor input, int64_t words) {
  STD_TORCH_CHECK(chunks(out) == chunks(input), "peak_copy: out and input must be of one size");
  STD_TORCH_CHECK(words == 1 || words == 4, "peak_copy: a thread copies 1 or 4 words, got ", words);
  const auto kernel = words == 1 ? copy_chunk<1, kChunk> : copy_chunk<4, kChunk / 4>;
  kernel<<<chunks(input), kChunk / words, 0, stream_of(input)>>>(static_cast<uint4*>(out.mutable_data_ptr()),
                                                                static_cast<const uint4*>(input.const_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void peak_read(Tensor sink, const Tensor input) {
  STD_TORCH_CHECK(sink.scalar_type() == ScalarType::Int && sink.numel() > 0, "peak_read: sink must be int32");
  read_chunks<<<full_grid(read_chunks), kThreads, 0, stream_of(input)>>>(
      static_cast<uint32_t*>(sink.mutable_data_ptr()), static_cast<const uint4*>(input.const_data_ptr()),
      chunks(input));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls launch.operator()<T, Accumulate>() with the dtypes of operands and sink.
template <typename Launch>
void dispatch(const Tensor& sink, const Tensor& operands, int64_t iterations, Launch launch) {
  STD_TORCH_CHECK(sink.dim() == 2 && sink.size(1) == kThreads && sink.size(0) <= INT_MAX / kThreads,
                  "peaks: sink must be of shape (blocks, ", kThreads, ")");
  const int64_t bytes = operands.numel() * operands.element_size();
  STD_TORCH_CHECK(bytes >= 4 * kTileWords, "peaks: needs ", 4 * kTileWords, " bytes of operands, got ", bytes);
  STD_TORCH_CHECK(sink.is_contiguous() && operands.is_contiguous(), "peaks: tensors must be contiguous");
  STD_TORCH_CHECK(iterations > 0 && iterations <= INT_MAX, "peaks: iterations must be positive and fit 32 bits");
  const ScalarType in = operands.scalar_type(), accumulate = sink.scalar_type();
  if (in == ScalarType::Half && accumulate == ScalarType::Float)
    launch.template operator()<__half, float>();
  else if (in == ScalarType::Half && accumulate == ScalarType::Half)
    launch.template operator()<__half, __half>();
  else if (in == ScalarType::BFloat16 && accumulate == ScalarType::Float)
    launch.template operator()<__nv_bfloat16, float>();
  else if (in == ScalarType::Float8_e4m3fn && accumulate == ScalarType::Float)
    launch.template operator()<__nv_fp8_e4m3, float>();
  else
    STD_TORCH_CHECK(false, "peaks: float16 accumulates in float32 or float16, bfloat16 and e4m3 in float32");
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void peak_mma(Tensor sink, const Tensor operands, int64_t iterations) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor), minor = attribute(cudaDevAttrComputeCapabilityMinor);
  STD_TORCH_CHECK(operands.scalar_type() != ScalarType::Float8_e4m3fn || major >= 12 || (major == 8 && minor == 9),
                  "peak_mma of e4m3 needs sm_89 or sm_120, this GPU is sm_", major, minor);
  dispatch(sink, operands, iterations, [&]<typename T, typename Accumulate>() {
    mma_loop<T, Accumulate><<<sink.size(0), kThreads, 0, stream_of(sink)>>>(
        static_cast<Accumulate*>(sink.mutable_data_ptr()), static_cast<const uint32_t*>(operands.const_data_ptr()),
        iterations);
  });
}

void peak_fma(Tensor sink, const Tensor operands, int64_t iterations) {
  STD_TORCH_CHECK(sink.scalar_type() == ScalarType::Float && operands.scalar_type() == ScalarType::Float,
                  "peak_fma takes float32");
  STD_TORCH_CHECK(sink.is_contiguous() && sink.dim() == 2 && sink.size(1) == kThreads && operands.is_contiguous() &&
                      operands.numel() >= 64 + kSums * kThreads,
                  "peak_fma: sink must be of shape (blocks, ", kThreads, "), and operands at least ",
                  64 + kSums * kThreads);
  fma_loop<<<sink.size(0), kThreads, 0, stream_of(sink)>>>(static_cast<float*>(sink.mutable_data_ptr()),
                                                           static_cast<const float*>(operands.const_data_ptr()),
                                                           static_cast<int>(iterations));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void peak_wgmma(Tensor sink, const Tensor operands, int64_t iterations) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor), minor = attribute(cudaDevAttrComputeCapabilityMinor);
  STD_TORCH_CHECK(major == 9, "peak_wgmma needs sm_90a, this GPU is sm_", major, minor);
  dispatch(sink, operands, iterations, [&]<typename T, typename Accumulate>() {
    wgmma_loop<T, Accumulate><<<sink.size(0), kThreads, 0, stream_of(sink)>>>(
        static_cast<Accumulate*>(sink.mutable_data_ptr()), static_cast<const uint32_t*>(operands.const_data_ptr()),
        iterations);
  });
}

}  // namespace minfer::peaks

STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) {
  m.def("peak_copy(Tensor(a!) out, Tensor input, int words) -> ()");
  m.def("peak_read(Tensor(a!) sink, Tensor input) -> ()");
  m.def("peak_mma(Tensor(a!) sink, Tensor operands, int iterations) -> ()");
  m.def("peak_fma(Tensor(a!) sink, Tensor operands, int iterations) -> ()");
  m.def("peak_wgmma(Tensor(a!) sink, Tensor operands, int iterations) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) {
  m.impl("peak_copy", TORCH_BOX(&minfer::peaks::peak_copy));
  m.impl("peak_read", TORCH_BOX(&minfer::peaks::peak_read));
  m.impl("peak_mma", TORCH_BOX(&minfer::peaks::peak_mma));
  m.impl("peak_fma", TORCH_BOX(&minfer::peaks::peak_fma));
  m.impl("peak_wgmma", TORCH_BOX(&minfer::peaks::peak_wgmma));
}
