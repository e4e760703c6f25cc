// A load behind a condition, as one instruction.
#pragma once

#include <cstdint>

namespace minfer {

// If `inside`, loads 8 or 16 bytes and bypasses L1; else reads nothing and leaves `words` as they are. It is one predicated
// instruction. For several `if (inside)` in a row the compiler would make one branch and move the loads behind all code between
// them. To keep later instructions from moving in front of the load, put a __syncwarp() after it.
template <typename Words>
__device__ inline void load_if(Words& words, const void* global, bool inside) {
  if constexpr (sizeof(Words) == 16)
    asm volatile(
        "{\n\t.reg .pred inside;\n\tsetp.ne.b32 inside, %5, 0;\n\t"
        "@inside ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(global), "r"(int(inside)));
  else
    asm volatile(
        "{\n\t.reg .pred inside;\n\tsetp.ne.b32 inside, %3, 0;\n\t@inside ld.global.cg.v2.b32 {%0, %1}, [%2];\n\t}"
        : "+r"(words.x), "+r"(words.y)
        : "l"(global), "r"(int(inside)));
}

}  // namespace minfer
