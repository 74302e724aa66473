// Matrix products whose every number is made of chains of multiply-adds, each over 256 of the depth, added up in their
// order, in float32: it does not depend on how many rows or columns there are, on their order, or on the number of
// threads. CPU; float32 and bfloat16.
//
// The shape is that of BLIS (Van Zee and van de Geijn, "BLIS: A framework for rapidly instantiating BLAS functionality",
// 2015): a panel of a few registers' width of the right side is packed, depth by columns, and a kernel keeps the sums of
// R rows of it in registers.

#include "lanes.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace {

using hybrid_rl::BFloat16;
using hybrid_rl::Lanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kDepth = 256; // of a packed panel, which then fits into the first cache, and of a chain
constexpr int64_t kRowsPerTask = 240; // whose depth fits into the second cache; a multiple of 6 and 12
constexpr int64_t kColumnsPerTask = 32; // a whole number of panels of any width
constexpr double kSerialWork = 1 << 17; // multiplications below which threads cost more than they bring

template <typename T>
struct Problem {
  const float* left; // [M, K]
  const T* right; // [N, K], or [K, N] if `by_depth`
  const float* bias; // [N] or null
  float* out; // [M, N]
  BFloat16* rounded; // [M, N], instead of out
  int64_t num_rows, num_columns, depth, right_stride;
  bool by_depth;

  int64_t num_strips() const {
    return (num_columns + kColumnsPerTask - 1) / kColumnsPerTask;
  }
  int64_t num_tasks() const {
    return (num_rows + kRowsPerTask - 1) / kRowsPerTask * num_strips();
  }
};

// Four rows of four numbers to four columns.
template <typename T>
HYBRID_RL_INLINE void transpose(const T* source, int64_t stride, float* target, int64_t width) {
  using V = Lanes<4>::Floats;
  using I = Lanes<4>::Ints;
  const V a = hybrid_rl::load<4>(source), b = hybrid_rl::load<4>(source + stride);
  const V c = hybrid_rl::load<4>(source + 2 * stride), d = hybrid_rl::load<4>(source + 3 * stride);
  const V ab_low = __builtin_shuffle(a, b, I{0, 4, 1, 5}), ab_high = __builtin_shuffle(a, b, I{2, 6, 3, 7});
  const V cd_low = __builtin_shuffle(c, d, I{0, 4, 1, 5}), cd_high = __builtin_shuffle(c, d, I{2, 6, 3, 7});
  hybrid_rl::store(target, __builtin_shuffle(ab_low, cd_low, I{0, 1, 4, 5}));
  hybrid_rl::store(target + width, __builtin_shuffle(ab_low, cd_low, I{2, 3, 6, 7}));
  hybrid_rl::store(target + 2 * width, __builtin_shuffle(ab_high, cd_high, I{0, 1, 4, 5}));
  hybrid_rl::store(target + 3 * width, __builtin_shuffle(ab_high, cd_high, I{2, 3, 6, 7}));
}

// Columns [first, first + P) of the right side into panel[depth, P], zeros beyond the last one.
template <typename T, int P>
HYBRID_RL_INLINE void pack(const Problem<T>& p, int64_t first, int64_t begin, int64_t end, float* panel) {
  const int64_t count = std::min<int64_t>(P, p.num_columns - first);
  if (p.by_depth || count < P) {
    const int64_t by_column = p.by_depth ? 1 : p.right_stride, by_depth = p.by_depth ? p.right_stride : 1;
    for (int64_t k = begin; k < end; ++k, panel += P) {
      const T* source = p.right + first * by_column + k * by_depth;
      for (int64_t column = 0; column < count; ++column) {
        panel[column] = hybrid_rl::to_float(source[column * by_column]);
      }
      std::fill(panel + count, panel + P, 0.0f);
    }
    return;
  }
  for (int64_t column = 0; column < P; column += 4) {
    const T* source = p.right + (first + column) * p.right_stride;
    int64_t k = begin;
    for (; k + 4 <= end; k += 4) {
      transpose(source + k, p.right_stride, panel + (k - begin) * P + column, P);
    }
    for (; k < end; ++k) {
      for (int64_t i = 0; i < 4; ++i) {
        panel[(k - begin) * P + column + i] = hybrid_rl::to_float(source[i * p.right_stride + k]);
      }
    }
  }
}

// sums[R, 2 W] += left[R, depth] * panel[depth, 2 W].
template <int W, int R>
HYBRID_RL_INLINE void multiply(const float* left, int64_t stride, const float* panel, int64_t depth, float* sums) {
  typename Lanes<W>::Floats kept[R][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const auto first = hybrid_rl::load<W>(panel + k * 2 * W), second = hybrid_rl::load<W>(panel + k * 2 * W + W);
    for (int r = 0; r < R; ++r) {
      const float factor = left[r * stride + k];
      kept[r][0] += factor * first;
      kept[r][1] += factor * second;
    }
  }
  for (int r = 0; r < R; ++r) {
    hybrid_rl::store(sums + r * 2 * W, hybrid_rl::load<W>(sums + r * 2 * W) + kept[r][0]);
    hybrid_rl::store(sums + r * 2 * W + W, hybrid_rl::load<W>(sums + r * 2 * W + W) + kept[r][1]);
  }
}

template <int W, int R>
HYBRID_RL_INLINE void multiply_rows(
    const float* left, int64_t stride, int64_t num_rows, const float* panel, int64_t depth, float* sums) {
  int64_t row = 0;
  for (; row + R <= num_rows; row += R) {
    multiply<W, R>(left + row * stride, stride, panel, depth, sums + row * 2 * W);
  }
  if constexpr (R > 1) {
    multiply_rows<W, (R > 4 ? R / 2 : R - 1)>(
        left + row * stride, stride, num_rows - row, panel, depth, sums + row * 2 * W);
  }
}

// Sums, and the bias, to where they belong.
template <typename T, int P>
HYBRID_RL_INLINE void write(const Problem<T>& p, const float* sums, int64_t first_row, int64_t num_rows, int64_t first) {
  const int64_t count = std::min<int64_t>(P, p.num_columns - first);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t place = (first_row + row) * p.num_columns + first;
    for (int64_t column = 0; column < count; ++column) {
      const float sum = sums[row * P + column];
      const float value = p.bias == nullptr ? sum : sum + p.bias[first + column];
      if (p.rounded != nullptr) {
        hybrid_rl::from_float(value, p.rounded[place + column]);
      } else {
        p.out[place + column] = value;
      }
    }
  }
}

template <typename T, int W>
HYBRID_RL_INLINE void multiply_all(const Problem<T>& p, int64_t first_task, int64_t last_task) {
  constexpr int P = 2 * W;
  alignas(64) float panel[kDepth * P];
  alignas(64) float sums[kRowsPerTask * P];
  for (int64_t task = first_task; task < last_task; ++task) {
    const int64_t row = task / p.num_strips() * kRowsPerTask, start = task % p.num_strips() * kColumnsPerTask;
    const int64_t num_rows = std::min(kRowsPerTask, p.num_rows - row);
    for (int64_t column = start; column < std::min(p.num_columns, start + kColumnsPerTask); column += P) {
      std::fill_n(sums, num_rows * P, 0.0f);
      for (int64_t begin = 0; begin < p.depth; begin += kDepth) {
        const int64_t end = std::min(p.depth, begin + kDepth);
        pack<T, P>(p, column, begin, end, panel);
        // Twice six sums are what 16 registers hold beside their factors; AVX-512 has twice as many.
        multiply_rows<W, (W == 16 ? 12 : 6)>(
            p.left + row * p.depth + begin, p.depth, num_rows, panel, end - begin, sums);
      }
      write<T, P>(p, sums, row, num_rows, column);
    }
  }
}

HYBRID_RL_PER_WIDTH(
    void multiply_tasks(const Problem<float>& p, int64_t first, int64_t last), (multiply_all<float, kWidth>(p, first, last));)

HYBRID_RL_PER_WIDTH(
    void multiply_tasks(const Problem<BFloat16>& p, int64_t first, int64_t last),
    (multiply_all<BFloat16, kWidth>(p, first, last));)

// float32 numbers of a tensor, in place or in `memory`.
const float* widened(const Tensor& tensor, std::vector<float>& memory) {
  if (tensor.scalar_type() == ScalarType::Float) {
    return static_cast<const float*>(tensor.const_data_ptr());
  }
  const BFloat16* source = static_cast<const BFloat16*>(tensor.const_data_ptr());
  memory.resize(static_cast<size_t>(tensor.numel()));
  torch::stable::parallel_for(0, tensor.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      memory[i] = hybrid_rl::to_float(source[i]);
    }
  });
  return memory.data();
}

Tensor exact_product(const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias, bool in_float32) {
  const ScalarType type = right.scalar_type();
  STD_TORCH_CHECK(
      (type == ScalarType::Float || type == ScalarType::BFloat16) && left.scalar_type() == type,
      "hybrid_rl::exact_product: left and right must both be float32 or both bfloat16");
  STD_TORCH_CHECK(
      left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(1) && left.is_contiguous(),
      "hybrid_rl::exact_product: left must be contiguous [M, K], right [N, K]");
  const bool by_depth = right.stride(1) != 1;
  STD_TORCH_CHECK(
      !by_depth || right.stride(0) == 1, "hybrid_rl::exact_product: right must be contiguous along one of its dims");
  STD_TORCH_CHECK(
      !bias.has_value() || (bias->dim() == 1 && bias->size(0) == right.size(0) && bias->is_contiguous() &&
          (bias->scalar_type() == ScalarType::Float || bias->scalar_type() == ScalarType::BFloat16)),
      "hybrid_rl::exact_product: bias must be contiguous float32 or bfloat16 [N]");
  const int64_t sizes[2] = {left.size(0), right.size(0)};
  const bool rounds = type == ScalarType::BFloat16 && !in_float32;
  Tensor out = torch::stable::new_empty(left, {sizes, 2}, rounds ? ScalarType::BFloat16 : ScalarType::Float);
  std::vector<float> left_memory, bias_memory;
  const auto start = [&](auto tag) {
    using T = decltype(tag);
    Problem<T> p{};
    p.left = widened(left, left_memory);
    p.right = static_cast<const T*>(right.const_data_ptr());
    p.bias = bias.has_value() ? widened(*bias, bias_memory) : nullptr;
    p.out = rounds ? nullptr : static_cast<float*>(out.mutable_data_ptr());
    p.rounded = rounds ? static_cast<BFloat16*>(out.mutable_data_ptr()) : nullptr;
    p.num_rows = left.size(0);
    p.num_columns = right.size(0);
    p.depth = left.size(1);
    p.right_stride = by_depth ? right.stride(1) : right.stride(0);
    p.by_depth = by_depth;
    const int64_t num_tasks = p.num_tasks();
    const double work = static_cast<double>(p.num_rows) * p.num_columns * p.depth;
    const int64_t grain = work < kSerialWork ? std::max<int64_t>(num_tasks, 1) : 1;
    torch::stable::parallel_for(0, num_tasks, grain, [&](int64_t begin, int64_t end) { multiply_tasks(p, begin, end); });
  };
  if (type == ScalarType::Float) {
    start(float{});
  } else {
    start(BFloat16{});
  }
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("exact_product(Tensor left, Tensor right, Tensor? bias, bool in_float32) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("exact_product", TORCH_BOX(&exact_product));
}
