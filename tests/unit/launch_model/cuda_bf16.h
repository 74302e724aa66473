// A stand-in of CUDA's bfloat16, as far as csrc/*_kernels.cu use it.

#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return value.bits;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) {
    return {0x7FFF};
  }
  return {static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
