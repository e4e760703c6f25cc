// The emulator's runtime, compiled once for all kernels: scheduling, errors, launches.
#include <torch.h>  // the precompiled one: see call.cpp

#include <array>
#include <numeric>

#pragma GCC optimize("O2")  // this file is compiled once and takes most of the run time

namespace emulator {

State state;
size_t most_shared = 99 << 10;
int multiprocessors = 3;
int mistake = 0;

std::string where() {
  const auto text = [](auto v) {
    return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
  };
  if (!state.current) return "the launch";
  return "thread " + text(state.current->index) + " of block " + text(state.current->block->index);
}

void fail(const std::string& what) {
  state.error = where() + " " + what;
  siglongjmp(state.scheduler, 2);
}

void within_bounds(int most, int blocks, int) {
  const int threads = state.block.x * state.block.y * state.block.z;
  state.registers = std::min(256, 65536 / (most * std::max(1, blocks))) / 8 * 8;  // as many as the compiler may use
  if (threads > most)
    fail("runs in a block of " + std::to_string(threads) + " threads, its __launch_bounds__ allow " + std::to_string(most));
}

// An SM has four schedulers of 16384 registers each. A warp belongs to one of them, and gets its registers 256 at a time.
void has_registers(int of_thread) {
  const int threads = state.block.x * state.block.y * state.block.z;
  const int most = 4 * kWarp * (16384 / ((of_thread * kWarp + 255) / 256 * 256));
  state.registers = (of_thread + 7) / 8 * 8;
  if (threads > most)
    fail("runs in a block of " + std::to_string(threads) + " threads, which may have " + std::to_string(of_thread) +
         " registers each: without __launch_bounds__ at most " + std::to_string(most) + " such threads are sure to fit");
}

void ask_for_registers(unsigned of_thread) {
  std::vector<unsigned>& asked = state.current->block->asked;
  asked.push_back(of_thread);
  const unsigned groups = state.of_block / kWarpgroup, given = state.registers * groups;
  if (asked.size() < groups) return;
  const unsigned sum = std::accumulate(asked.begin(), asked.end(), 0u);
  if (sum > given)
    fail("waits for ever at setmaxnreg: the registers per thread that the block's warpgroups request add up to " +
         std::to_string(sum) + ", those of the launch to " + std::to_string(given));
  asked.clear();
}

__attribute__((noinline)) void suspend() {
  if (!_setjmp(state.current->context)) siglongjmp(state.scheduler, 1);
}

void wait_for(const char* what) {
  state.current->waits = what;
  suspend();
}

template <typename Range>
void shuffle(Range& range) {
  std::shuffle(range.begin(), range.end(), state.random);
}

void release(std::vector<Thread*> threads) {
  shuffle(threads);
  if (state.random() % 2) {
    static std::vector<unsigned> order;
    order.resize(state.warps.size());
    std::iota(order.begin(), order.end(), 0);
    shuffle(order);
    const bool of_one_warp = std::all_of(threads.begin(), threads.end(), [&](const Thread* thread) {
      return thread->number / kWarp == threads.front()->number / kWarp;
    });
    if (!of_one_warp)
      std::stable_sort(threads.begin(), threads.end(),
                       [&](auto* a, auto* b) { return order[a->number / kWarp] < order[b->number / kWarp]; });
  }
  for (Thread* thread : threads) thread->waits = nullptr;
  auto slow = threads.end();
  if (state.slow_from < state.slow_to)
    slow = std::stable_partition(threads.begin(), threads.end(), [](const Thread* thread) {
      return thread->number < state.slow_from || thread->number >= state.slow_to;
    });
  state.ready.insert(state.random() % 4 ? state.ready.end() : state.ready.begin(), threads.begin(), slow);
  state.ready.insert(state.ready.begin(), slow, threads.end());
}

// Waits at a barrier of all threads of some blocks, from `first` on.
void meet(unsigned& arrived, const Block* first, unsigned blocks, const char* what) {
  const unsigned of_block = state.of_block;
  if (++arrived < of_block * blocks) return wait_for(what);
  arrived = 0;
  std::vector<Thread*> all(of_block * blocks);
  for (unsigned i = 0; i < all.size(); ++i) all[i] = &state.threads[first->number * of_block + i];
  release(std::move(all));
  suspend();
}

void barrier() {
  Block* block = state.current->block;
  meet(block->at_barrier, block, 1, "__syncthreads()");
}
void cluster_barrier() {
  Block* first = state.current->block - state.current->block->rank;
  meet(first->at_cluster_barrier, first, state.cluster, "cluster_sync()");
}

void** gather(const char* what, void* mine, unsigned lanes) {
  const Thread* self = state.current;
  Warp& warp = group_of(*self, lanes);
  const unsigned there = std::min(lanes, state.of_block - self->rank / lanes * lanes);
  if (there < lanes) fail(std::string("calls ") + what + " in a warp of " + std::to_string(there) + " threads");
  if (warp.arrived && warp.what != what && strcmp(warp.what, what))
    fail(std::string("comes to ") + what + " while lanes of its warp wait at " + warp.what);
  warp.what = what;
  warp.operands[self->rank % lanes] = mine;
  if (++warp.arrived == lanes) return warp.operands;
  wait_for(what);
  return nullptr;
}

void release_others(unsigned lanes) {
  const Thread* self = state.current;
  group_of(*self, lanes).arrived = 0;
  std::vector<Thread*> others;
  others.reserve(lanes);
  for (unsigned i = 0, first = self->number - self->rank % lanes; i < lanes; ++i)
    if (first + i != self->number) others.push_back(&state.threads[first + i]);
  release(std::move(others));
}

void run_thread() {
  (*state.body)();
  Thread* self = state.current;
  self->groups.push_back(self->open);
  for (const auto& group : self->groups)
    if (!group.empty()) fail("ends while its cp.async are in flight");
  if (!self->stores.empty() || !self->store_groups.empty()) fail("ends while its TMA stores read shared memory");
  if (self->products_done < group_of(*self, kWarpgroup).products.size()) fail("ends while its wgmma are in flight");
  self->ended = true, ++self->block->ended;
  siglongjmp(state.scheduler, 1);
}

// The outermost function of each stack. It never returns: a thread that ends, or a launch that fails, jumps away, and the
// next thread jumps back to here.
void enter() {
  _setjmp(state.fibers[state.current->number].next_thread);
  run_thread();
}

void resume(Thread& thread) {
  state.current = &thread;
  if (thread.started) _longjmp(thread.context, 1);
  thread.started = true;
  Fiber& fiber = state.fibers[thread.number];
  if (fiber.prepared) _longjmp(fiber.next_thread, 1);
  fiber.prepared = true;
  static ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = state.stacks + thread.number * kStack;
  start.uc_stack.ss_size = kStack;
  makecontext(&start, enter, 0);
  setcontext(&start);
}

// Ends one of the transfers in flight, any.
void finish_one() {
  state.current = nullptr;
  std::swap(state.transfers[state.random() % state.transfers.size()], state.transfers.back());
  const std::shared_ptr<Transfer> transfer = state.transfers.back();
  state.transfers.pop_back();
  if (!transfer->done) transfer->work();
  transfer->done = true;
}

// Runs the clusters until no thread can go on; false after an error.
__attribute__((noinline)) bool run_ready() {
  if (sigsetjmp(state.scheduler, 0) == 2) return false;
  const auto waits = [] {  // for a transfer
    if (state.ready.empty() || state.random() % state.pace == 0) return true;
    const unsigned next = state.ready.back()->number;
    return state.slowest && next >= state.slow_from && next < state.slow_to;
  };
  while (!state.transfers.empty() && waits()) finish_one();
  if (state.ready.empty()) return true;
  Thread* next = state.ready.back();
  state.ready.pop_back();
  resume(*next);
  __builtin_unreachable();
}

void check_ended() {
  std::map<std::string, unsigned> waiting;
  unsigned ended = 0;
  for (const Thread& thread : state.threads) thread.ended ? ++ended : ++waiting[thread.waits];
  if (waiting.empty()) return;
  std::string text = "of " + std::to_string(state.threads.size()) + " threads ";
  for (const auto& [what, count] : waiting) text += std::to_string(count) + " wait for ever at " + what + ", ";
  throw std::runtime_error(text + std::to_string(ended) + " have ended; all threads must reach the same");
}

void run_blocks(const std::function<void()>& body, unsigned count) {
  const unsigned all = count * state.blocks.size();
  state.threads.clear(), state.threads.resize(all);
  state.of_block = count;
  state.warps = std::vector<Warp>(state.blocks.size() * ((count + kWarp - 1) / kWarp));
  state.warpgroups = std::vector<Warp>(state.blocks.size() * ((count + kWarpgroup - 1) / kWarpgroup));
  state.ready.clear(), state.transfers.clear(), state.barriers.clear(), state.at_flags.clear();
  state.body = &body;
  const unsigned cluster = state.cluster * count;
  const unsigned slow = std::array{0u, all > cluster ? cluster : 0u, kWarp, all > count ? count : 0u}[state.random() % 4];
  state.slow_from = slow ? state.random() % ((all + slow - 1) / slow) * slow : 0, state.slow_to = state.slow_from + slow;
  state.pace = 1 << state.random() % 14;
  state.slowest = all > cluster && state.random() % 2;
  for (Block& block : state.blocks)
    for (auto& [id, region] : block.shared) region->poison();
  std::vector<Thread*> threads;
  for (unsigned i = 0; i < all; ++i) {
    const dim3& b = state.block;
    Thread& thread = state.threads[i];
    thread.block = &state.blocks[i / count], thread.number = i, thread.rank = i % count;
    thread.index = {thread.rank % b.x, thread.rank / b.x % b.y, thread.rank / b.x / b.y};
    threads.push_back(&thread);
  }
  release(threads);
  const bool right = run_ready();
  state.current = nullptr;
  if (!right) throw std::runtime_error(state.error);
  check_ended();
  for (const Block& block : state.blocks)
    for (auto& [id, region] : block.shared)
      if (!region->intact()) throw std::runtime_error("a block wrote outside its " + region->name);
}

void launch(const Launch& how, const std::function<void()>& body) {
  const unsigned count = how.block.x * how.block.y * how.block.z;
  if (count == 0 || count > kMostThreads) throw std::runtime_error("a block of " + std::to_string(count) + " threads");
  if (how.grid.x == 0 || how.grid.y > 65535 || how.grid.y == 0) throw std::runtime_error("a grid that CUDA refuses");
  if (how.shared > state.shared_allowed)
    throw std::runtime_error("a launch with " + std::to_string(how.shared) + " bytes of dynamic shared memory, " +
                             std::to_string(state.shared_allowed) + " are allowed");
  if (how.cluster == 0 || how.cluster > kMostCluster || how.grid.x % how.cluster || (how.cluster > 1 && count % kWarp))
    throw std::runtime_error("a cluster of " + std::to_string(how.cluster) + " blocks that the emulator refuses");
  state.grid = how.grid, state.block = how.block;
  state.cluster = how.cluster;
  const unsigned all = how.grid.x * how.grid.y * how.grid.z;
  state.blocks = std::vector<Block>(how.together && all <= kMostCluster ? all : how.cluster);
  for (Block& block : state.blocks)
    block.shared[-1] = std::make_unique<Region>("dynamic shared memory", how.shared, true, 1024);
  if (!state.stacks) {
    void* stacks = mmap(nullptr, kMostCluster * kMostThreads * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) throw std::bad_alloc();
    state.stacks = static_cast<char*>(stacks);
    state.fibers = std::make_unique<Fiber[]>(kMostCluster * kMostThreads);
  }
  std::vector<uint3> clusters;  // their first blocks
  for (unsigned z = 0; z < how.grid.z; ++z)
    for (unsigned y = 0; y < how.grid.y; ++y)
      for (unsigned x = 0; x < how.grid.x; x += how.cluster) clusters.push_back({x, y, z});
  shuffle(clusters);
  for (size_t next = 0; next < clusters.size();) {
    for (unsigned i = 0; i < state.blocks.size(); ++i) {
      Block& block = state.blocks[i];
      block.number = i, block.rank = i % how.cluster;
      block.at_barrier = block.at_cluster_barrier = block.ended = 0, block.at_barrier_of_warps.clear();
      block.named.clear(), block.asked.clear();
      block.index = {clusters[next].x + block.rank, clusters[next].y, clusters[next].z};
      if (block.rank + 1 == how.cluster) ++next;
    }
    run_blocks(body, count);
  }
}

__attribute__((optimize("O3"), no_sanitize("alignment", "bounds"))) void multiply_add(double (&C)[16][8],
                                                                                   const double (&A)[16][16],
                                                                                   const double (&B)[16][8]) {
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) C[m][n] += A[m][k] * B[k][n];
}

void check_shared(const char* what, const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail(std::string(what) + ": an address is no multiple of 16 bytes");
  if (!state.current->block->find(p, bytes)) fail(std::string(what) + ": an address is outside shared memory");
}

void check_global(const char* what, const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail(std::string(what) + ": an address is no multiple of 16 bytes");
  for (const Region* region : state.operands)
    if (region->contains(p, bytes)) return;
  for (const Region& region : state.scratch)
    if (region.contains(p, bytes)) return;
  fail(std::string(what) + ": an address is outside the operands");
}

void on_signal(int, siginfo_t* info, void*) {
  for (const Region* region : state.operands)
    if (region->near(info->si_addr))
      fail(region->contains(info->si_addr, 1) ? "writes operand " + region->name + ", which is an input"
                                              : "touches memory outside operand " + region->name);
  for (const std::deque<Region>* regions : {&state.scratch, &state.counters})
    for (const Region& region : *regions)
      if (region.near(info->si_addr)) fail("touches memory outside its " + region.name);
  for (const Block& block : state.blocks)
    for (const auto& [id, region] : block.shared)
      if (region->near(info->si_addr)) fail("touches memory outside its " + region->name);
  fail("touches memory that is no operand and not shared");
}

Library& library() {  // a function's, because kernels register themselves before main
  static Library kept;
  return kept;
}

}  // namespace emulator

// The handlers of -fsanitize=alignment,bounds; each is given a description that begins with the place in the source.
struct SanitizedPlace {
  const char* file;
  uint32_t line, column;
};
extern "C" void __ubsan_handle_type_mismatch_v1_abort(SanitizedPlace* place, void*) {
  emulator::fail(std::string("makes a misaligned access at ") + place->file + ":" + std::to_string(place->line));
}
extern "C" void __ubsan_handle_out_of_bounds_abort(SanitizedPlace* place, void* index) {
  emulator::fail("takes index " + std::to_string(reinterpret_cast<intptr_t>(index)) + " of an array at " + place->file +
                 ":" + std::to_string(place->line));
}
