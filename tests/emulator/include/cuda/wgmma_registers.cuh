// The emulator's own `minfer/cuda/wgmma_registers.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// A's fragment: registers 0 and 2 are row lane / 4 of a warp's 16, 1 and 3 the row 8 below; 0 and 1 the steps
// 2 (lane % 4) and the next, 2 and 3 those 8 further.
template <typename T, bool kTransposedB, int kRegisters>
void wgmma_registers(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, bool add) {
  constexpr int kN = kRegisters * 2;
  emulator::Thread* self = emulator::state.current;
  if (!self->fenced) emulator::fail("starts wgmma with no wgmma.fence since it had its sums");
  const auto place = self->sums.try_emplace(d, emulator::Sums{{d, d + kRegisters}, 0}).first;
  place->second.group = self->product_groups;
  std::fill(d, d + kRegisters, NAN);
  struct Operands {
    const uint32_t* a;
    uint64_t b;
    bool add;
    float* sums;
  } mine{a, b, add, place->second.values.data()};
  emulator::collective<emulator::kWarpgroup>("wgmma", mine, [=](Operands** lanes) {
    for (int i = 0; i < 128; ++i)
      if (lanes[i]->b != b || lanes[i]->add != add) emulator::fail("wgmma: its threads disagree");
    const auto read = [=] {
      std::vector<uint16_t> values;
      read_tile(values, b, kN, !kTransposedB);
      return values;
    };
    const std::vector<uint16_t> values = read();
    const std::vector<float> columns = floats<T>(values);
    for (int m = 0; m < 64; ++m) {
      std::vector<uint16_t> bits(16);
      for (int k = 0; k < 16; ++k) {
        const uint32_t both = lanes[m / 16 * 32 + m % 8 * 4 + k % 8 / 2]->a[m % 16 / 8 + k / 8 * 2];
        bits[k] = static_cast<uint16_t>(both >> k % 2 * 16);
      }
      const std::vector<float> numbers = floats<T>(bits);
      double row[kN];
      dot_products(row, numbers.data(), columns.data(), kN);
      for (int n = 0; n < kN; ++n) {
        float& sum = lanes[m / 16 * 32 + m % 8 * 4 + n % 8 / 2]->sums[n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
        sum = float((add ? double(sum) : 0.0) + row[n]);
      }
    }
    warpgroup().products.push_back({emulator::state.current->product_groups, 128, [=] { return read() == values; }});
  });
}

template <int kPending, int kRegisters>
void wgmma_wait_for(float (&)[kRegisters]) {
  wgmma_wait<kPending>();
}

}  // namespace minfer
