// See torch/csrc/stable/tensor.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch::stable {

struct DeclaredLibrary {
  void def(const char* schema);
  template <typename... Parameters>
  void impl(const char* name, void (*function)(Parameters...));
};

}  // namespace torch::stable

#define TORCH_BOX(FUNCTION) FUNCTION
#define DECLARED_JOIN(A, B) A##B
#define DECLARED_NAME(PREFIX, ID) DECLARED_JOIN(PREFIX, ID)
#define DECLARED_FUNCTION(M) \
  [[maybe_unused]] static void DECLARED_NAME(declared_registration_, __COUNTER__)(torch::stable::DeclaredLibrary & M)
#define STABLE_TORCH_LIBRARY_FRAGMENT(NS, M) DECLARED_FUNCTION(M)
#define STABLE_TORCH_LIBRARY_IMPL(NS, DEVICE, M) DECLARED_FUNCTION(M)
