// Replaces CCCL's header of this name in `build.device_code`. PyTorch's complex.h includes it in
// every kernel. No kernel of ours uses it, and CCCL's takes two of the four seconds that a small kernel takes to compile. This
// one declares what PyTorch's templates name and defines nothing: a kernel whose device code calls it does not compile.
#pragma once

namespace thrust {

template <typename T>
struct complex {
  __host__ __device__ complex(T real = T(), T imag = T());
  __host__ __device__ T real() const;
  __host__ __device__ T imag() const;
};

template <typename T>
__host__ __device__ complex<T> polar(const T& size, const T& angle = T());

}  // namespace thrust
