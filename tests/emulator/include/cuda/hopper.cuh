// The emulator's own `minfer/cuda/hopper.cuh`: written from the PTX ISA, and not from ours. A copy of the copy engine
// ends at any time after it was started, and until then its destination is NaN. Products are taken when they are
// started, and their operands looked at again when they are waited for; until then the sums are NaN.
#pragma once

#include "cuda/mma.cuh"

namespace emulator {

[[maybe_unused]] static const size_t kHopperShared = most_shared = 227 << 10;
// Fewer than for other kernels, so that each block has several tiles.
[[maybe_unused]] static const int kHopperMultiprocessors = multiprocessors = 2;

inline bool has_ended(const Block& block) { return block.ended == state.of_block; }

// Where a place in shared memory of the running block lies in that of another of its cluster.
inline char* at_block(const void* p, int rank) {
  if (rank < 0 || unsigned(rank) >= state.cluster) fail("names a block that its cluster does not have");
  Block& other = state.current->block[rank - int(state.current->block->rank)];
  for (const auto& [id, region] : state.current->block->shared)
    if (region->contains(p, 1)) {
      if (has_ended(other)) fail("reaches into a block that has ended");
      return other.shared.at(id)->begin + (static_cast<const char*>(p) - region->begin);
    }
  fail("names shared memory of another block by an address that is none of its own");
}

inline Barrier& barrier_at(const void* p) {
  const auto found = state.barriers.find(p);
  if (found == state.barriers.end()) fail("uses an mbarrier that is not initialised");
  return found->second;
}

inline void end_phase_if_complete(Barrier& barrier) {
  if (barrier.left || barrier.bytes) return;
  barrier.left = barrier.arrivals, ++barrier.phase;
  const std::vector<Thread*> waiting = std::move(barrier.waiting);
  barrier.waiting.clear();
  if (!waiting.empty()) release(waiting);
}

inline void arrive(Barrier& barrier, int64_t bytes) {
  if (barrier.left == 0) fail("arrives at an mbarrier more often than it was initialised for");
  --barrier.left, barrier.bytes += bytes;
  end_phase_if_complete(barrier);
}

// A row's piece of 16 bytes under the 128-byte swizzle: bits 4-6 of an address by its bits 7-9; under that of 64 bytes
// two of these bits, of 32 bytes one. Shared memory is aligned to 1024 bytes here.
inline char* swizzled(char* p, int span = 128) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  return reinterpret_cast<char*>(address ^ (address >> 7 & (span / 16 - 1)) << 4);
}

inline std::shared_ptr<Transfer> start(std::function<void()> work) {
  state.transfers.push_back(std::make_shared<Transfer>(Transfer{std::move(work)}));
  return state.transfers.back();
}

}  // namespace emulator

namespace minfer {

inline void barrier_init(uint64_t* barrier, int arrivals) {
  emulator::check_shared("mbarrier.init", barrier, 8);
  if (emulator::state.barriers.count(barrier)) emulator::fail("initialises an mbarrier twice");
  emulator::state.barriers[barrier] = {arrivals, arrivals};
}
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t* barrier, int bytes) { emulator::arrive(emulator::barrier_at(barrier), bytes); }
inline void barrier_arrive(uint64_t* barrier) { emulator::arrive(emulator::barrier_at(barrier), 0); }
inline void barrier_arrive_at(uint64_t* barrier, int block) {
  emulator::arrive(emulator::barrier_at(emulator::at_block(barrier, block)), 0);
}
inline void barrier_wait(uint64_t* at, uint32_t parity) {
  if (parity > 1) emulator::fail("waits for a parity that is neither 0 nor 1");
  emulator::Barrier& barrier = emulator::barrier_at(at);
  while (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(emulator::state.current);
    emulator::wait_for("an mbarrier");
  }
  if (barrier.of_cp_async) emulator::state.current->acquired_copies = true;
}

struct TensorMap {
  char* matrix = nullptr;
  int rows, cols, box_rows, box_cols;
  int64_t ld;  // bytes
  int span;    // of the swizzle, in bytes; 0 for none

  bool is_swizzled() const { return span > 0; }

  // Calls piece(to or from shared memory, in global memory or null, inside) for each 16 bytes of a box, of which the first
  // `inside` bytes are of the matrix: a row may end within them.
  template <typename F>
  void for_pieces(char* box, int x, int y, F piece) const {
    for (int r = 0; r < box_rows; ++r)
      for (int c = 0; c < box_cols; c += 8) {
        const int inside = y + r < rows ? 2 * std::clamp(cols - x - c, 0, 8) : 0;
        char* place = box + (r * box_cols + c) * 2;
        char* at = inside > 0 ? matrix + (y + r) * ld + (x + c) * 2 : nullptr;
        piece(is_swizzled() ? emulator::swizzled(place, span) : place, at, inside);
      }
  }
  int bytes() const { return box_rows * box_cols * 2; }
};

inline void tma_prefetch(const TensorMap&) {}

inline void check_box(const TensorMap& map, const void* box, int x) {
  if (reinterpret_cast<uintptr_t>(box) % (map.is_swizzled() ? 1024 : 128))
    emulator::fail("TMA: a box is at no multiple of 1024 bytes, or of 128 if it is not swizzled");
  if (!emulator::state.current->block->find(box, map.bytes())) emulator::fail("TMA: a box is outside shared memory");
  if (x % 8) emulator::fail("TMA: a box starts at no multiple of 16 bytes in global memory");
}

inline void tma_load_multicast(void* box, const TensorMap& map, uint64_t* barrier, int x, int y, uint16_t blocks) {
  check_box(map, box, x);
  for (int block = 0; block < 16; ++block) {
    if (!(blocks >> block & 1)) continue;
    char* to = emulator::at_block(box, block);
    emulator::Barrier* full = &emulator::barrier_at(emulator::at_block(barrier, block));
    memset(to, 0xff, map.bytes());
    emulator::start([=, other = emulator::state.current->block + block - emulator::state.current->block->rank] {
      if (emulator::has_ended(*other)) emulator::fail("TMA copies to a block that has ended");
      map.for_pieces(to, x, y, [](char* to, const char* from, int inside) {
        if (from) memcpy(to, from, inside);
        memset(to + inside, 0, 16 - inside);
      });
      full->bytes -= map.bytes();
      emulator::end_phase_if_complete(*full);
    });
  }
}
inline void tma_load(void* box, const TensorMap& map, uint64_t* barrier, int x, int y) {
  tma_load_multicast(box, map, barrier, x, y, 1 << emulator::state.current->block->rank);
}

inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  for (const void* address : {static_cast<const void*>(to), from})
    if (reinterpret_cast<uintptr_t>(address) % 16 || bytes % 16) emulator::fail("TMA: a copy of no multiples of 16 bytes");
  if (!emulator::state.current->block->find(to, bytes)) emulator::fail("TMA: a copy goes outside shared memory");
  if (emulator::state.current->acquired) emulator::fail("TMA copies what others wrote without a fence since");
  emulator::Barrier* full = &emulator::barrier_at(barrier);
  memset(to, 0xff, bytes);
  emulator::start([=] {
    memcpy(to, from, bytes);
    full->bytes -= bytes;
    emulator::end_phase_if_complete(*full);
  });
}
inline void fence_async_global() { emulator::state.current->acquired = false; }

// Element e of a lane's pair of matrix i is in row lane / 4 and column 2 (lane % 4) + e.
template <typename Place>
void stmatrix(void* row, const uint32_t (&fragment)[4], Place place) {
  struct Operands {
    char* row;
    const uint32_t* fragment;
  } mine{static_cast<char*>(row), fragment};
  emulator::check_shared("stmatrix", row, 16);
  emulator::state.current->unfenced.push_back({mine.row, mine.row + 16});
  emulator::collective("stmatrix", mine, [=](Operands** lanes) {
    for (int i = 0; i < 4; ++i)
      for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 2; ++e) {
          const auto [row, col] = place(lane / 4, lane % 4 * 2 + e);
          memcpy(lanes[8 * i + row]->row + col * 2, reinterpret_cast<const char*>(&lanes[lane]->fragment[i]) + e * 2, 2);
        }
  });
}
inline void stmatrix_x4(void* row, const uint32_t (&fragment)[4]) {
  stmatrix(row, fragment, [](int row, int col) { return std::pair(row, col); });
}
inline void stmatrix_x4_transposed(void* row, const uint32_t (&fragment)[4]) {
  stmatrix(row, fragment, [](int row, int col) { return std::pair(col, row); });
}

inline void fence_async() { emulator::state.current->unfenced.clear(), emulator::state.current->acquired_copies = false; }

// Starts a copy of shared memory to global memory, which `store` makes, at some time until it is waited for.
template <typename Store>
void start_store(char* from, int bytes, Store store) {
  for (const emulator::Thread& thread : emulator::state.threads)
    for (const auto& [begin, end] : thread.unfenced)
      if (begin < from + bytes && from < end) emulator::fail("TMA stores what was written without a fence since");
  const std::vector<char> before(from, from + bytes);
  emulator::state.current->stores.push_back(emulator::start([=] {
    if (memcmp(before.data(), from, before.size())) emulator::fail("shared memory changes while TMA stores it");
    store(from);
  }));
}

inline void tma_store(const TensorMap& map, const void* box, int x, int y) {
  check_box(map, box, x);
  start_store(static_cast<char*>(const_cast<void*>(box)), map.bytes(), [=](char* from) {
    map.for_pieces(from, x, y, [](const char* from, char* to, int inside) { if (to) memcpy(to, from, inside); });
  });
}
inline void tma_store_commit() {
  emulator::Thread* self = emulator::state.current;
  self->store_groups.push_back(std::move(self->stores));
  self->stores.clear();
}
template <int kPending>
void tma_store_wait() {
  auto& groups = emulator::state.current->store_groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const auto& store : groups.front()) {
      if (!store->done) store->work();
      store->done = true;
    }
}

inline uint64_t tile_descriptor(const void* tile, int leading, int stride) {
  const uint64_t address = static_cast<const char*>(tile) - emulator::dynamic_shared();
  return (address & 0x3ffff) >> 4 | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t{1} << 62;
}

// The elements of `rows` x 16 of a tile by its descriptor, k fastest; a row is one of A, or a column of B. K-major: rows
// of 128 bytes, 8 of them a group, the groups `stride` apart. Otherwise 64 rows are 128 bytes of one k, 8 k a group, the
// groups `stride` apart, and 64 rows more `leading`.
inline void read_tile(std::vector<uint16_t>& values, uint64_t descriptor, int rows, bool k_major) {
  const int64_t leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const emulator::Region& shared = *emulator::state.current->block->shared[-1];
  char* tile = shared.begin + ((descriptor & 0x3fff) << 4);
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < 16; ++k) {
      const int64_t at = k_major ? row / 8 * stride + row % 8 * 128 + k * 2
                                 : row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
      const char* p = emulator::swizzled(tile + at);
      if (!shared.contains(p, 2)) emulator::fail("wgmma: an operand is outside shared memory");
      values.push_back(*reinterpret_cast<const uint16_t*>(p));
    }
}

template <typename T>
std::vector<float> floats(const std::vector<uint16_t>& values, int which = 0) {
  std::vector<float> found(values.size());
  for (size_t i = 0; i < values.size(); ++i) found[i] = emulated_number(reinterpret_cast<const T&>(values[i]), which);
  return found;
}

// product[n] = a . b[n] over 16 steps in k, exactly but for the last bits of a double.
[[gnu::optimize("O3")]] inline void dot_products(double* product, const float* a, const float* b, int columns) {
  for (int n = 0; n < columns; ++n) {
    double sum = 0;
    for (int k = 0; k < 16; ++k) sum += double(a[k]) * b[n * 16 + k];
    product[n] = sum;
  }
}

inline emulator::Warp& warpgroup() {
  return emulator::group_of(*emulator::state.current, emulator::kWarpgroup);
}

inline void wgmma_fence() { emulator::state.current->fenced = true; }
inline void wgmma_commit() { ++emulator::state.current->product_groups; }

template <int kPending>
void wgmma_wait() {
  emulator::Thread* self = emulator::state.current;
  auto& products = warpgroup().products;
  const auto arrived = [&](unsigned group) { return group + kPending < self->product_groups; };
  for (; self->products_done < products.size() && arrived(products[self->products_done].group); ++self->products_done) {
    emulator::Product& product = products[self->products_done];
    if (--product.lanes_left > 0) continue;
    if (!product.unchanged()) emulator::fail("shared memory changed while wgmma read it");
    product.unchanged = nullptr;
  }
  for (auto sums = self->sums.begin(); sums != self->sums.end();) {
    if (arrived(sums->second.group)) {
      std::copy(sums->second.values.begin(), sums->second.values.end(), sums->first);
      sums = self->sums.erase(sums), self->fenced = false;
    } else {
      ++sums;
    }
  }
  int mine = 0;
  emulator::collective("wgmma.wait_group", mine, [](int**) {});  // .aligned: a lane goes on when all have waited
}
template <int kM, int kN>
void wgmma_finish(float (&)[kM][kN]) {
  wgmma_wait<0>();
}

template <typename T, bool kTransposedB, int kRegisters, bool kTransposedA = false>
void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  constexpr int kN = kRegisters * 2;
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  emulator::Thread* self = emulator::state.current;
  if (!self->fenced) emulator::fail("starts wgmma with no wgmma.fence since it had its sums");
  if (self->acquired_copies) emulator::fail("wgmma reads what cp.async wrote without a fence since");
  const auto place = self->sums.try_emplace(d, emulator::Sums{{d, d + kRegisters}, 0}).first;
  place->second.group = self->product_groups;
  std::fill(d, d + kRegisters, NAN);
  struct Operands {
    uint64_t a, b;
    bool add;
    float* sums;
  } mine{a, b, add, place->second.values.data()};
  emulator::collective<emulator::kWarpgroup>("wgmma", mine, [=](Operands** lanes) {
    for (int i = 0; i < 128; ++i)
      if (lanes[i]->a != a || lanes[i]->b != b || lanes[i]->add != add) emulator::fail("wgmma: its threads disagree");
    const auto read = [=] {
      std::vector<uint16_t> values;
      values.reserve((64 + kN) * 16);
      read_tile(values, a, 64, !kTransposedA), read_tile(values, b, kN, !kTransposedB);
      return values;
    };
    const std::vector<uint16_t> values = read();
    const std::vector<float> numbers = floats<T>(values);
    constexpr bool kPairs = std::is_same_v<T, E4M3Pair>;
    const std::vector<float> others = kPairs ? floats<T>(values, 1) : std::vector<float>();
    for (int m = 0; m < 64; ++m) {
      double row[kN], more[kN] = {};
      dot_products(row, &numbers[m * 16], &numbers[1024], kN);
      if (kPairs) dot_products(more, &others[m * 16], &others[1024], kN);
      for (int n = 0; n < kN; ++n) row[n] += more[n];
      // Row g of a warp's 16 is in the lanes 4 g to 4 g + 3 for g < 8, and row g + 8 in the same.
      for (int n = 0; n < kN; ++n) {
        const int lane = m / 16 * 32 + m % 8 * 4 + n % 8 / 2, i = n / 8 * 4 + m % 16 / 8 * 2 + n % 2;
        float& sum = lanes[lane]->sums[i];
        sum = float((add ? double(sum) : 0.0) + row[n]);
      }
    }
    const auto unchanged = [=] { return read() == values; };
    warpgroup().products.push_back({emulator::state.current->product_groups, 128, unchanged});
  });
}

inline int warpgroup_index() { return threadIdx.x / 128; }

template <int kThreads = 128>
void warps_sync() {
  static_assert(kThreads % 32 == 0);
  int mine = 0;
  emulator::collective("bar.sync", mine, [](int**) {});  // .aligned: all lanes of a warp come together
  std::vector<emulator::Thread*>& there = emulator::state.current->block->at_barrier_of_warps;
  there.push_back(emulator::state.current);
  if (there.size() < kThreads) return emulator::wait_for("a barrier of some warps");
  const std::vector<emulator::Thread*> all = std::move(there);
  there.clear();
  emulator::release(all);
  emulator::suspend();
}

// The emulator has no registers. It checks that all warps of a warpgroup request as many, and that the block has enough.
template <int kRegisters>
void registers_down() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  int mine = 0;
  emulator::collective<emulator::kWarpgroup>("setmaxnreg", mine, [](int**) { emulator::ask_for_registers(kRegisters); });
}
template <int kRegisters>
void registers_up() {
  registers_down<kRegisters>();
}

inline int cluster_rank() { return emulator::state.current->block->rank; }
inline void cluster_sync_relaxed() { emulator::cluster_barrier(); }

inline void flag_raise(unsigned* flag) {
  if (*flag) emulator::fail("raises a flag that nobody has taken down");
  *flag = 1;
  const std::vector<emulator::Thread*> waiting = std::move(emulator::state.at_flags[flag]);
  emulator::state.at_flags.erase(flag);
  if (!waiting.empty()) emulator::release(waiting);
}
inline void counter_add(unsigned* counter) { ++*counter; }
inline unsigned counter_read(const unsigned* counter) { return *counter; }
inline void flag_take(unsigned* flag) {
  while (!*flag) {
    emulator::state.at_flags[flag].push_back(emulator::state.current);
    emulator::wait_for("a flag");
  }
  *flag = 0, emulator::state.current->acquired = true;
}

template <typename T>
bool make_tensor_map(TensorMap& map, const T* matrix, int rows, int cols, int64_t ld, int box_rows, int box_cols,
                     int span = -1) {
  if (span < 0) span = box_cols == 64 ? 128 : 0;
  map = {const_cast<char*>(reinterpret_cast<const char*>(matrix)), rows, cols, box_rows, box_cols, ld * 2, span};
  if (span > 0 && box_cols * 2 > span) return false;
  return rows > 0 && cols > 0 && ld % 8 == 0 && box_rows > 0 && box_rows <= 256 && box_cols > 0 &&
         box_cols <= 256 && box_cols % 8 == 0;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared,
                            cudaStream_t stream, const Arguments&... arguments) {
  emulator::Launch launch(blocks, threads, shared, stream);
  launch.cluster = cluster, launch.together = true;
  emulator::launch(launch, [&] { kernel(arguments...); });
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters_together(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, int shared,
                                     cudaStream_t stream, const Arguments&... arguments) {
  return launch_clusters(kernel, cluster, blocks, threads, shared, stream, arguments...);
}

// How many run at once is the GPU's affair: other ones at each call, so that kernels that ask have few tiles and many.
template <typename Kernel>
cudaError_t clusters_at_once(int* clusters, Kernel*, int cluster, int threads, int shared) {
  if (cluster < 1 || cluster > emulator::kMostCluster || threads < 1 || threads > emulator::kMostThreads || shared < 0 ||
      size_t(shared) > emulator::state.shared_allowed)
    return cudaErrorInvalidValue;
  *clusters = 1 + (emulator::state.call + 2) % 4;
  return cudaSuccess;
}

}  // namespace minfer
