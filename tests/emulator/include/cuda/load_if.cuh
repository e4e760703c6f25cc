// The emulator's own `minfer/cuda/load_if.cuh`, which it stands in for.
#pragma once

#include "runtime.h"

namespace minfer {

template <typename Words>
void load_if(Words& words, const void* global, bool inside) {
  if (!inside) return;
  emulator::check_global("ld.global", global, sizeof(Words));
  memcpy(&words, global, sizeof(Words));
}

}  // namespace minfer
