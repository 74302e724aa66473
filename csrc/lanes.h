// Floats side by side, as compiler vectors: sixteen at a time wherever memory is laid out, and as many as a register
// holds where sums are to stay in registers (GCC keeps vectors wider than a register in memory).

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// The compiler makes one copy of a function per instruction set and the loader picks one, so that a wheel runs on any
// x86-64 and is fast on the newer ones. What such a function calls must be inlined into it: HYBRID_RL_INLINE.
// -DHYBRID_RL_TARGETS= makes one copy, for the processor of -march: how the copies for others are tested.
// HYBRID_RL_PER_WIDTH(declaration, body) does the same for a function whose body names the width of a register, kWidth.
#if !defined(HYBRID_RL_TARGETS) && defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRID_RL_TARGETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HYBRID_RL_PER_WIDTH(declaration, body) \
  __attribute__((target("arch=x86-64-v4"))) declaration { constexpr int kWidth = 16; body } \
  __attribute__((target("arch=x86-64-v3"))) declaration { constexpr int kWidth = 8; body } \
  __attribute__((target("default"))) declaration { constexpr int kWidth = 4; body }
#else
#if !defined(HYBRID_RL_TARGETS)
#define HYBRID_RL_TARGETS
#endif
#if defined(__AVX512F__)
#define HYBRID_RL_WIDTH 16
#elif defined(__AVX2__)
#define HYBRID_RL_WIDTH 8
#else
#define HYBRID_RL_WIDTH 4
#endif
#define HYBRID_RL_PER_WIDTH(declaration, body) \
  declaration { constexpr int kWidth = HYBRID_RL_WIDTH; body }
#endif
#define HYBRID_RL_INLINE inline __attribute__((always_inline))

// Vectors never cross a call that is not inlined, so their calling convention does not matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace hybrid_rl {

constexpr int kLanes = 16;

// W numbers side by side. Written out: GCC forgets a size that depends on a parameter.
template <int W>
struct Lanes;
#define HYBRID_RL_LANES(W) \
  template <> \
  struct Lanes<W> { \
    using Floats = float __attribute__((vector_size(4 * W))); \
    using Ints = int32_t __attribute__((vector_size(4 * W))); \
    using Words = uint32_t __attribute__((vector_size(4 * W))); \
    using Halves = uint16_t __attribute__((vector_size(2 * W))); \
    using Shorts = int16_t __attribute__((vector_size(2 * W))); \
    using Integers = int8_t __attribute__((vector_size(W))); \
  };
HYBRID_RL_LANES(4)
HYBRID_RL_LANES(8)
HYBRID_RL_LANES(16)
#undef HYBRID_RL_LANES

using Floats = Lanes<kLanes>::Floats;
using Ints = Lanes<kLanes>::Ints;
using Words = Lanes<kLanes>::Words;

struct BFloat16 {
  uint16_t bits;
};

template <int W = kLanes>
HYBRID_RL_INLINE typename Lanes<W>::Floats load(const float* source) {
  typename Lanes<W>::Floats lanes;
  std::memcpy(&lanes, source, sizeof(lanes));
  return lanes;
}

template <int W = kLanes>
HYBRID_RL_INLINE typename Lanes<W>::Floats load(const BFloat16* source) {
  typename Lanes<W>::Halves halves;
  std::memcpy(&halves, source, sizeof(halves));
  const typename Lanes<W>::Words words = __builtin_convertvector(halves, typename Lanes<W>::Words) << 16;
  typename Lanes<W>::Floats lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
}

template <int W = kLanes>
HYBRID_RL_INLINE typename Lanes<W>::Floats load(const int8_t* source) {
  typename Lanes<W>::Integers integers;
  std::memcpy(&integers, source, sizeof(integers));
  // In two steps: of one from 8 to 32 bits GCC makes scalars.
  const auto shorts = __builtin_convertvector(integers, typename Lanes<W>::Shorts);
  return __builtin_convertvector(__builtin_convertvector(shorts, typename Lanes<W>::Ints), typename Lanes<W>::Floats);
}

template <typename V>
HYBRID_RL_INLINE void store(float* target, V lanes) {
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

// Round to nearest, ties to even; NaN stays NaN.
HYBRID_RL_INLINE void from_float(float value, BFloat16& target) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  // Some NaN would overflow to zeros.
  const bool is_nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = is_nan ? word | 0x400000u : word + 0x7FFFu + ((word >> 16) & 1u);
  target.bits = static_cast<uint16_t>(rounded >> 16);
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87. x = n ln 2 + r, and a polynomial in r.
template <typename V>
HYBRID_RL_INLINE V exp_of_nonpositive(V x) {
  using Ints = typename Lanes<sizeof(V) / sizeof(float)>::Ints;
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // All ones where 87 < |x| <= infinity, so that NaN stays NaN. Integers only: GCC makes scalars of a comparison of
  // vectors wider than a register.
  const Ints size = bits & 0x7FFFFFFF;
  const Ints vanishes = ((0x42AE0000 - size) & ~(0x7F800000 - size)) >> 31;
  bits &= ~vanishes;
  V inside;
  std::memcpy(&inside, &bits, sizeof(bits));
  constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number, which its low bits hold
  const V shifted = inside * 1.44269504f + kRound;
  const V n = shifted - kRound;
  const V r = (inside - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts (Cody and Waite)
  // Taylor's series to the seventh power: its remainder for |r| <= ln(2)/2 is below half a unit in the last place.
  V p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127) << 23;
  V power;
  std::memcpy(&power, &bits, sizeof(power));
  p *= power;
  std::memcpy(&bits, &p, sizeof(bits));
  bits &= ~vanishes;
  std::memcpy(&p, &bits, sizeof(bits));
  return p;
}

template <typename V>
HYBRID_RL_INLINE float sum_of(V lanes) {
  float total = 0.0f;
  for (size_t i = 0; i < sizeof(V) / sizeof(float); ++i) {
    total += lanes[i];
  }
  return total;
}

// The largest of scores [begin, end), a whole number of runs of W and at least one.
template <int W>
HYBRID_RL_INLINE float largest_of(const float* scores, int64_t begin, int64_t end) {
  auto largest = load<W>(scores + begin);
  for (int64_t i = begin + W; i < end; i += W) {
    const auto next = load<W>(scores + i);
    largest = next > largest ? next : largest;
  }
  float top = largest[0];
  for (int lane = 1; lane < W; ++lane) {
    top = largest[lane] > top ? largest[lane] : top;
  }
  return top;
}

} // namespace hybrid_rl
