// Sixteen elements at a time as their bits: loaded, and converted between the floating dtypes.

#pragma once

#include "lanes.h"
#include "strided_copy.h"

#include <cstdint>
#include <cstring>

namespace hybrid_rl::strided {

using Halves = Lanes<kLanes>::Halves;
using Bytes = uint8_t __attribute__((vector_size(kLanes)));

template <typename T>
HYBRID_RL_INLINE T read(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

HYBRID_RL_INLINE Words as_words(Floats lanes) {
  Words words;
  std::memcpy(&words, &lanes, sizeof(words));
  return words;
}

HYBRID_RL_INLINE Floats as_floats(Words words) {
  Floats lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
}

// All ones where limit < value; both below 2^31. Integers only: GCC makes scalars of a comparison of vectors wider than
// a register.
HYBRID_RL_INLINE Words above(Words value, uint32_t limit) {
  return (Words)(((Ints)(limit - value)) >> 31);
}

HYBRID_RL_INLINE Words choose(Words mask, Words one, Words other) {
  return (one & mask) | (other & ~mask);
}

template <int32_t kType>
HYBRID_RL_INLINE Words load_bits(const char* source) {
  if constexpr (size_of(kType) == 4) {
    return read<Words>(source);
  } else if constexpr (size_of(kType) == 2) {
    return __builtin_convertvector(read<Halves>(source), Words);
  } else {
    return __builtin_convertvector(read<Bytes>(source), Words);
  }
}

// A NaN that is converted becomes the canonical one of its new dtype: sign and payload would depend on the machine.
HYBRID_RL_INLINE Words float_of_half(Words half) {
  const Words size = half & 0x7FFFu;
  const Words exponent = size & 0x7C00u;
  Words bits = (size << 13) + (112u << 23);
  const Words subnormal = as_words(as_floats(bits + (1u << 23)) - as_floats(Words{} + (113u << 23)));
  bits = choose(above(exponent, 0u), bits, subnormal);
  bits = choose(above(exponent, 0x7BFFu), Words{} + 0x7F800000u, bits);
  bits |= (half & 0x8000u) << 16;
  return choose(above(size, 0x7C00u), Words{} + 0x7FC00000u, bits);
}

HYBRID_RL_INLINE Words half_of_float(Words bits) {
  constexpr uint32_t kMagic = 126u << 23; // 0.5: adding it shifts a subnormal to where its bits belong, rounded
  const Words size = bits & 0x7FFFFFFFu;
  const Words normal = (size + (0xFFFu - (112u << 23)) + ((size >> 13) & 1u)) >> 13;
  const Words small = choose(above(size, (113u << 23) - 1), Words{}, size); // kept from overflowing below
  const Words subnormal = as_words(as_floats(small) + as_floats(Words{} + kMagic)) - kMagic;
  Words half = choose(above(size, (113u << 23) - 1), normal, subnormal);
  half = choose(above(size, (143u << 23) - 1), Words{} + 0x7C00u, half);
  half |= (bits >> 16) & 0x8000u;
  return choose(above(size, 0x7F800000u), Words{} + 0x7E00u, half);
}

HYBRID_RL_INLINE Words bfloat16_of_float(Words bits) {
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return choose(above(bits & 0x7FFFFFFFu, 0x7F800000u), Words{} + 0x7FC0u, rounded);
}

HYBRID_RL_INLINE Words float_of_bfloat16(Words bits) {
  bits <<= 16;
  return choose(above(bits & 0x7FFFFFFFu, 0x7F800000u), Words{} + 0x7FC00000u, bits);
}

template <int32_t kFrom, int32_t kTo>
HYBRID_RL_INLINE Words convert(Words bits) {
  if constexpr (kFrom == kTo) {
    return bits;
  } else if constexpr (kFrom == kHalf) {
    return convert<kFloat, kTo>(float_of_half(bits));
  } else if constexpr (kFrom == kBFloat16) {
    return convert<kFloat, kTo>(float_of_bfloat16(bits));
  } else if constexpr (kTo == kHalf) {
    return half_of_float(bits);
  } else {
    return bfloat16_of_float(bits);
  }
}

} // namespace hybrid_rl::strided
