// Launches a kernel with counters for each pair of a capture of a CUDA graph (0: none, -1: CUDA does not say) and a stream, and
// returns the addresses of the counters. A number says which mistake the kernel makes with them.
#include "cuda/counters.cuh"

using minfer::Tensor;

__global__ void count(unsigned* counters) {
  counters[minfer::kMostCounters - 1] ^= 0x80000000;  // as a barrier of blocks does
  if (emulator::mistake == 1) counters[7] = 1;
  if (emulator::mistake == 2) counters[minfer::kMostCounters] = 0;
}

static void test_counters(Tensor addresses, const Tensor captures, const Tensor streams) {
  const int64_t* of_captures = minfer::input<int64_t>(captures, "counters: captures");
  const int64_t* of_streams = minfer::input<int64_t>(streams, "counters: streams");
  for (int64_t i = 0; i < captures.numel(); ++i) {
    emulator::state.capture = of_captures[i];
    emulator::state.of_capture = of_captures[i] < 0 ? cudaErrorStreamCaptureImplicit : cudaSuccess;
    unsigned* counters = minfer::counters_of(reinterpret_cast<cudaStream_t>(of_streams[i]));
    STD_TORCH_CHECK(emulator::state.of_capture == cudaSuccess, "the error is left");
    STD_TORCH_CHECK(emulator::state.capture_mode == cudaStreamCaptureModeGlobal, "captures are left in the relaxed mode");
    STD_TORCH_CHECK(std::all_of(counters, counters + minfer::kMostCounters, [](unsigned x) { return x << 1 == 0; }),
                    "counters begin with other values than zero");
    minfer::output<int64_t>(addresses, "counters: addresses")[i] = reinterpret_cast<int64_t>(counters);
    emulator::state.capture = 0;
    count<<<1, 1>>>(counters);
  }
}

MINFER_OP(test_counters, "(Tensor(a!) addresses, Tensor captures, Tensor streams) -> ()")
