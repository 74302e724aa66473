// Sixteen floats at a time, as a compiler vector: one register of AVX-512, two of AVX2, four of SSE or NEON.

#pragma once

#include <cstdint>
#include <cstring>

// The compiler makes one copy of a function per instruction set and the loader picks one, so that a wheel runs on any
// x86-64 and is fast on the newer ones. What such a function calls must be inlined into it: HYBRID_RL_INLINE.
// -DHYBRID_RL_TARGETS= makes one copy, for the processor of -march: how the copies for others are tested.
#if defined(HYBRID_RL_TARGETS)
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
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
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // All ones where 87 < |x| <= infinity, so that NaN stays NaN. Integers only: GCC makes scalars of a comparison of
  // vectors wider than a register.
  const Ints size = bits & 0x7FFFFFFF;
  const Ints vanishes = ((0x42AE0000 - size) & ~(0x7F800000 - size)) >> 31;
  bits &= ~vanishes;
  Floats inside;
  std::memcpy(&inside, &bits, sizeof(bits));
  constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number, which its low bits hold
  const Floats shifted = inside * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (inside - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts (Cody and Waite)
  // Taylor's series to the seventh power: its remainder for |r| <= ln(2)/2 is below half a unit in the last place.
  Floats p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof(power));
  p *= power;
  std::memcpy(&bits, &p, sizeof(bits));
  bits &= ~vanishes;
  std::memcpy(&p, &bits, sizeof(bits));
  return p;
}

HYBRID_RL_INLINE float sum_of(Floats lanes) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) {
    total += lanes[i];
  }
  return total;
}

} // namespace hybrid_rl
