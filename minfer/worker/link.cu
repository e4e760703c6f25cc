// Changes signs of an input by the result of the call before (links.py). link.ptx is made of this file:
// `nvcc -ptx -arch=sm_80 link.cu`, with ".version 7.0" in its head, so that older drivers take it, too.
// `changed` and `result` are `n_...` integers, `step_...` integers apart.
template <typename T>
__device__ void link(T* changed, const T* result, long long n_changed, long long step_changed, long long n_result,
                     long long step_result, long long shift) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long j = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; j < n_changed; j += stride) {
    unsigned bits = 0;
    for (long long k = n_result < n_changed ? j % n_result : j; k < n_result; k += n_changed) {
      const unsigned value = result[k * step_result];
      bits ^= value ^ (value << shift);
    }
    changed[j * step_changed] ^= static_cast<T>(bits & (1u << (8 * sizeof(T) - 1)));
  }
}

#define LINK(name, type)                                                                                             \
  extern "C" __global__ void name(type* changed, const type* result, long long n_changed, long long step_changed,    \
                                  long long n_result, long long step_result, long long shift) {                      \
    link(changed, result, n_changed, step_changed, n_result, step_result, shift);                                    \
  }

LINK(link_1, unsigned char)
LINK(link_2, unsigned short)
LINK(link_4, unsigned)
