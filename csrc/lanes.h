// Sixteen floats at a time, as a compiler vector: one register of AVX-512, two of AVX2, four of SSE or NEON.

#pragma once

#include <cstdint>
#include <cstring>

// The compiler makes one copy of a function per instruction set and the loader picks one, so that a wheel runs on any
// x86-64 and is fast on the newer ones. What such a function calls must be inlined into it: HYBRID_RL_INLINE.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRID_RL_TARGETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HYBRID_RL_TARGETS
#endif
#define HYBRID_RL_INLINE inline __attribute__((always_inline))

// Vectors never cross a call that is not inlined, so their calling convention does not matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace hybrid_rl {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};

HYBRID_RL_INLINE Floats load(const float* source) {
  Floats lanes;
  std::memcpy(&lanes, source, sizeof(lanes));
  return lanes;
}

HYBRID_RL_INLINE Floats load(const BFloat16* source) {
  Halves halves;
  std::memcpy(&halves, source, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
}

HYBRID_RL_INLINE void store(float* target, Floats lanes) {
  std::memcpy(target, &lanes, sizeof(lanes));
}

HYBRID_RL_INLINE float to_float(float value) {
  return value;
}

HYBRID_RL_INLINE float to_float(BFloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof(result));
  return result;
}

HYBRID_RL_INLINE void from_float(float value, float& target) {
  target = value;
}

// Round to nearest, ties to even; the value is finite.
HYBRID_RL_INLINE void from_float(float value, BFloat16& target) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  target.bits = static_cast<uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87. x = n ln 2 + r, and a polynomial in r.
HYBRID_RL_INLINE Floats exp_of_nonpositive(Floats x) {
  const Floats too_small = Floats{} - 87.0f;
  const Ints vanishes = x < too_small;
  const Floats clamped = vanishes ? too_small : x;
  constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
  const Floats n = (clamped * 1.44269504f + kRound) - kRound;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts (Cody and Waite)
  // Taylor's series to the seventh power: its remainder for |r| <= ln(2)/2 is below half a unit in the last place.
  Floats p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof(power));
  return vanishes ? Floats{} : p * power;
}

HYBRID_RL_INLINE float sum_of(Floats lanes) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) {
    total += lanes[i];
  }
  return total;
}

HYBRID_RL_INLINE float max_of(Floats lanes) {
  float largest = lanes[0];
  for (int i = 1; i < kLanes; ++i) {
    largest = lanes[i] > largest ? lanes[i] : largest;
  }
  return largest;
}

} // namespace hybrid_rl
