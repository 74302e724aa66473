// A stand-in of CUDA's float16, as far as csrc/*_kernels.cu use it.

#pragma once

#include <cstring>

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}

inline unsigned short __half_as_ushort(__half value) {
  return value.bits;
}

inline float __half2float(__half value) {
  _Float16 narrow;
  std::memcpy(&narrow, &value.bits, sizeof(narrow));
  return static_cast<float>(narrow);
}

inline __half __float2half_rn(float value) {
  const auto narrow = static_cast<_Float16>(value);
  __half half;
  std::memcpy(&half.bits, &narrow, sizeof(narrow));
  return half;
}
