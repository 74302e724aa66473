// A linear layer with weights of 8 bits, on the CPU: float32 rows become integers of up to 16 bits each, with a scale of
// their own, products are added up exactly in int32, and only the sum becomes a float again. The PyTorch form in
// hybrid_rl/models/int8/rounding.py is the oracle, to the bit: integers have no order of summation, so a row's result
// depends neither on the other rows, nor on the number of threads, nor on the instruction set.
//
// x86 has multiplied pairs of int16 and added them up since SSE2 (pmaddwd): 16 products in one instruction of AVX2, where
// a float32 FMA has 8. Products of int8 only would be as many on AVX2 (they need a second instruction), with activations
// of 8 bits, whose rounding is the larger error.

// A product and a sum that became one operation would round once.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "int8_rows.h"
#include "lanes.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace {

using hybrid_rl::kLargestWeight;
using hybrid_rl::kRound;
using hybrid_rl::largest_magnitude;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kColumns = 4; // rows of weights in a tile
constexpr int64_t kBlockBytes = 1 << 14; // of weights that a task multiplies with all inputs
constexpr int64_t kProductsPerTask = 1 << 20; // about 30 microseconds

// inputs: int16 [num_rows, stride], of which `size` count; weights: int8 [N, size]; out: [num_rows, N].
struct Product {
  const int16_t* inputs;
  const int8_t* weights;
  const float* input_scales;
  const float* weight_scales;
  const float* bias;
  float* out;
  int64_t num_rows, num_columns, size, stride;

  HYBRID_RL_INLINE void write(int64_t m, int64_t n, const int32_t* sums, int count) const {
    for (int j = 0; j < count; ++j) {
      out[m * num_columns + n + j] = static_cast<float>(sums[j]) * (input_scales[m] * weight_scales[n + j]) + bias[n + j];
    }
  }
};

namespace plain {
#define HYBRID_RL_TARGET
using Vector = int32_t;
constexpr int64_t kStep = 1;
inline Vector zero() { return 0; }
inline Vector inputs(const int16_t* p) { return *p; }
inline Vector weights(const int8_t* p) { return *p; }
inline Vector add_products(Vector sums, Vector x, Vector w) { return sums + x * w; }
inline void store_sums(const Vector* sums, int32_t* totals) { std::copy_n(sums, kColumns, totals); }
#include "int8_tile.h"
#undef HYBRID_RL_TARGET
} // namespace plain

#if defined(__x86_64__) && defined(__GNUC__)
#define HYBRID_RL_HELPER HYBRID_RL_TARGET inline __attribute__((always_inline))

namespace avx2 {
#define HYBRID_RL_TARGET __attribute__((target("avx2")))
using Vector = __m256i;
constexpr int64_t kStep = 16;
HYBRID_RL_HELPER Vector zero() { return _mm256_setzero_si256(); }
HYBRID_RL_HELPER Vector inputs(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(p)); }
HYBRID_RL_HELPER Vector weights(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HYBRID_RL_HELPER Vector add_products(Vector sums, Vector x, Vector w) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(x, w));
}
HYBRID_RL_HELPER void store_sums(const Vector* sums, int32_t* totals) {
  const Vector pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(totals), four);
}
#include "int8_tile.h"
#undef HYBRID_RL_TARGET
} // namespace avx2

namespace avx512 {
#define HYBRID_RL_TARGET __attribute__((target("avx512f,avx512bw")))
using Vector = __m512i;
constexpr int64_t kStep = 32;
HYBRID_RL_HELPER Vector zero() { return _mm512_setzero_si512(); }
HYBRID_RL_HELPER Vector inputs(const int16_t* p) { return _mm512_loadu_si512(p); }
HYBRID_RL_HELPER Vector weights(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HYBRID_RL_HELPER Vector add_products(Vector sums, Vector x, Vector w) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(x, w));
}
HYBRID_RL_HELPER void store_sums(const Vector* sums, int32_t* totals) {
  for (int j = 0; j < kColumns; ++j) {
    totals[j] = _mm512_reduce_add_epi32(sums[j]);
  }
}
#include "int8_tile.h"
#undef HYBRID_RL_TARGET
} // namespace avx512

namespace vnni { // product and sum in one instruction
#define HYBRID_RL_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
using avx512::kStep;
using avx512::Vector;
HYBRID_RL_HELPER Vector zero() { return avx512::zero(); }
HYBRID_RL_HELPER Vector inputs(const int16_t* p) { return avx512::inputs(p); }
HYBRID_RL_HELPER Vector weights(const int8_t* p) { return avx512::weights(p); }
HYBRID_RL_HELPER Vector add_products(Vector sums, Vector x, Vector w) { return _mm512_dpwssd_epi32(sums, x, w); }
HYBRID_RL_HELPER void store_sums(const Vector* sums, int32_t* totals) { avx512::store_sums(sums, totals); }
#include "int8_tile.h"
#undef HYBRID_RL_TARGET
} // namespace vnni
#endif

using Multiply = void (*)(const Product&, int64_t, int64_t);

Multiply fastest() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw")) {
    return __builtin_cpu_supports("avx512vnni") ? &vnni::multiply : &avx512::multiply;
  }
  if (__builtin_cpu_supports("avx2")) {
    return &avx2::multiply;
  }
#endif
  return &plain::multiply;
}

// A row of activations as integers of at most `largest`: x = out * scale, which is returned; NaN for a row that has an
// infinite number or none.
HYBRID_RL_TARGETS float round_inputs(const float* x, int64_t size, int32_t largest, int16_t* out) {
  const float magnitude = largest_magnitude(x, size);
  const float inverse = static_cast<float>(largest) / magnitude;
  // Of numbers so small that this is infinite nothing is lost with zeros.
  if (!std::isfinite(magnitude) || !(inverse < 1e38f)) {
    std::fill(out, out + size, int16_t{0});
    return std::isfinite(magnitude) ? 0.0f : std::nanf("");
  }
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<int16_t>(static_cast<int32_t>((x[i] * inverse + kRound) - kRound));
  }
  return magnitude / static_cast<float>(largest);
}

HYBRID_RL_TARGETS float round_weights(const float* w, int64_t size, int8_t* out) {
  return hybrid_rl::round_row(w, size, out);
}

const float* floats(const Tensor& tensor, int64_t size, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() && tensor.numel() == size && tensor.is_cpu(),
      name, " must be contiguous float32 on the CPU, of ", size, " elements");
  return static_cast<const float*>(tensor.const_data_ptr());
}

Tensor int8_linear(const Tensor& input, const Tensor& weight, const Tensor& scales, std::optional<Tensor> bias) {
  STD_TORCH_CHECK(input.dim() == 2 && weight.dim() == 2, "input is [M, K], weight [N, K]");
  STD_TORCH_CHECK(
      weight.scalar_type() == ScalarType::Char && weight.is_contiguous() && weight.is_cpu(),
      "weight must be contiguous int8 on the CPU");
  const int64_t num_rows = input.size(0), size = input.size(1), num_columns = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == size, "input has ", size, " columns, weight ", weight.size(1));
  const float* x = floats(input, num_rows * size, "input");
  Tensor out = torch::stable::new_empty(input, {num_rows, num_columns}, ScalarType::Float);
  const int64_t stride = (size + 31) / 32 * 32;
  std::vector<int16_t> integers(static_cast<size_t>(num_rows * stride));
  std::vector<float> input_scales(static_cast<size_t>(num_rows));
  // No sum of products can leave int32.
  const int32_t largest =
      static_cast<int32_t>(std::min<int64_t>(32767, INT32_MAX / (kLargestWeight * std::max<int64_t>(size, 1))));
  torch::stable::parallel_for(
      0, num_rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          input_scales[row] = round_inputs(x + row * size, size, largest, integers.data() + row * stride);
        }
      });
  const std::vector<float> no_bias(bias.has_value() ? 0 : static_cast<size_t>(num_columns));
  const Product product{
      integers.data(),
      static_cast<const int8_t*>(weight.const_data_ptr()),
      input_scales.data(),
      floats(scales, num_columns, "scales"),
      bias.has_value() ? floats(*bias, num_columns, "bias") : no_bias.data(),
      static_cast<float*>(out.mutable_data_ptr()),
      num_rows,
      num_columns,
      size,
      stride};
  static const Multiply multiply = fastest();
  const int64_t block = std::max<int64_t>(1, kBlockBytes / (kColumns * std::max<int64_t>(size, 1))) * kColumns;
  const int64_t num_blocks = (num_columns + block - 1) / block;
  const int64_t products = std::max<int64_t>(1, num_rows * size * block);
  torch::stable::parallel_for(
      0, num_blocks, std::max<int64_t>(1, kProductsPerTask / products), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
          multiply(product, at * block, std::min(num_columns, (at + 1) * block));
        }
      });
  return out;
}

void int8_round(const Tensor& weight, Tensor values, Tensor scales) {
  STD_TORCH_CHECK(weight.dim() == 2, "weight is [N, K]");
  const int64_t num_rows = weight.size(0), size = weight.size(1);
  const float* w = floats(weight, num_rows * size, "weight");
  floats(scales, num_rows, "scales");
  STD_TORCH_CHECK(
      values.scalar_type() == ScalarType::Char && values.is_contiguous() && values.numel() == num_rows * size,
      "values must be contiguous int8, of as many elements as weight");
  int8_t* out = static_cast<int8_t*>(values.mutable_data_ptr());
  float* row_scales = static_cast<float*>(scales.mutable_data_ptr());
  torch::stable::parallel_for(
      0, num_rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          row_scales[row] = round_weights(w + row * size, size, out + row * size);
        }
      });
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("int8_round(Tensor weight, Tensor(a!) values, Tensor(b!) scales) -> ()");
  library.def("int8_linear(Tensor input, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("int8_round", TORCH_BOX(&int8_round));
  library.impl("int8_linear", TORCH_BOX(&int8_linear));
}
