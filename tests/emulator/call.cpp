// What Python calls: an op of a kernel's library, by its name, on copies of its tensors in guarded memory.
#include <torch.h>  // first, and not as a file beside this one: the compiler then takes the precompiled one

#include <signal.h>

// The schema of an op of the library, or null; Python reads from it what `emulator_call` is to be given.
extern "C" const char* emulator_schema(const char* name) {
  const auto found = emulator::library().schemas.find(name);
  return found == emulator::library().schemas.end() ? nullptr : found->second.c_str();
}

namespace emulator {

// A tensor of a call: a copy in guarded memory, as far from a multiple of 16 bytes as the caller's own.
class Operand {
 public:
  Operand(const Argument& argument, bool at_end)
      : caller_(argument), skew_(reinterpret_cast<uintptr_t>(argument.tensor.data) % 16),
        region(argument.name, argument.tensor.bytes() + skew_, at_end) {
    region.begin += skew_;
    memcpy(region.begin, argument.tensor.data, argument.tensor.bytes());
    if (!argument.is_written) region.protect(PROT_READ);
  }

  // What is wrong with what the kernel wrote; what is right goes back to the caller's tensor.
  std::string finish() const {
    if (!caller_.is_written) return "";
    const torch::stable::Tensor& tensor = caller_.tensor;
    std::vector<bool> between(tensor.bytes(), true);  // elements of the tensor
    const int64_t size = torch::headeronly::item_size(tensor.dtype);
    tensor.for_elements([&](int64_t at) { std::fill_n(between.begin() + at, size, false); });
    bool intact = region.intact();
    for (size_t i = 0; i < between.size(); ++i) intact &= !between[i] || region.begin[i] == tensor.data[i];
    memcpy(tensor.data, region.begin, tensor.bytes());
    return intact ? "" : "the kernel wrote outside operand " + region.name;
  }

 private:
  const Argument& caller_;
  size_t skew_;

 public:
  Region region;
};

// Calls an op on copies of its tensors; returns what went wrong.
std::string call(const char* name, const std::vector<Argument>& arguments) {
  std::deque<Operand> operands;
  std::vector<Argument> copies = arguments;
  std::string problem;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind != Argument::kTensor) continue;
    operands.emplace_back(arguments[i], state.random() % 2);
    copies[i].tensor.data = operands.back().region.begin;
    state.operands.push_back(&operands.back().region);
  }
  const int signals[] = {SIGSEGV, SIGBUS};
  struct sigaction before[2], ours = {};
  ours.sa_sigaction = on_signal, ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int i = 0; i < 2; ++i) sigaction(signals[i], &ours, &before[i]);
  try {
    library().functions.at(name)(copies.data(), static_cast<int>(copies.size()));
  } catch (const std::exception& caught) {
    problem = caught.what();
  }
  for (int i = 0; i < 2; ++i) sigaction(signals[i], &before[i], nullptr);
  for (const Region& region : state.scratch)
    if (problem.empty() && !region.intact()) problem = "the kernel wrote outside its " + region.name;
  for (const Region& region : state.counters)  // whose highest bits a barrier of blocks flips (`cuda/grid.cuh`)
    if (problem.empty() && std::any_of(reinterpret_cast<unsigned*>(region.begin), reinterpret_cast<unsigned*>(region.end),
                                       [](unsigned counter) { return counter << 1; }))
      problem = "the kernel left a counter that is not zero";
  for (const Operand& operand : operands)
    if (const std::string found = operand.finish(); problem.empty()) problem = found;
  return problem;
}

}  // namespace emulator

// Calls an op by its name, with one of its mistakes or none; what went wrong is written to `error`.
extern "C" void emulator_call(const char* name, const emulator::Argument* arguments, int count, unsigned seed,
                              int chosen, char* error, size_t error_bytes) {
  using namespace emulator;
  state.random.seed(seed), state.call = seed, mistake = chosen;
  state.shared_allowed = kDefaultShared;
  std::string problem;
  try {
    problem = call(name, {arguments, arguments + count});
  } catch (const std::exception& caught) {
    problem = caught.what();
  }
  state.scratch.clear(), state.operands.clear();
  strncpy(error, problem.c_str(), error_bytes - 1);
}
