// See torch/csrc/stable/tensor.h.
#pragma once

#include <cstdint>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
