// Rows of floats as integers of 8 bits with a scale. hybrid_rl/models/int8/rounding.py has the oracle, to the bit.

#pragma once

#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hybrid_rl {

constexpr int32_t kLargestWeight = 127;
constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number, ties to the even one

// The largest magnitude of a row; infinity or NaN if a number is not finite.
HYBRID_RL_INLINE float largest_magnitude(const float* x, int64_t size) {
  int32_t top = 0; // bits of magnitudes: they are ordered as the numbers are, and NaN is above infinity
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  float magnitude;
  std::memcpy(&magnitude, &top, sizeof(magnitude));
  return magnitude;
}

// A row as integers from -127 to 127: x = out * scale, which is returned; NaN for a row that has an infinite number or
// none. Divided, not multiplied with an inverse: the quotient that is rounded is the nearest.
HYBRID_RL_INLINE float round_row(const float* x, int64_t size, int8_t* out) {
  const float scale = largest_magnitude(x, size) / static_cast<float>(kLargestWeight);
  if (!std::isfinite(scale) || scale == 0.0f) {
    std::fill(out, out + size, int8_t{0});
    return std::isfinite(scale) ? 0.0f : std::nanf("");
  }
  for (int64_t i = 0; i < size; ++i) {
    const int32_t whole = static_cast<int32_t>((x[i] / scale + kRound) - kRound);
    out[i] = static_cast<int8_t>(std::clamp(whole, -kLargestWeight, kLargestWeight));
  }
  return scale;
}

} // namespace hybrid_rl
