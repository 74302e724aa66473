// Adapters merged into weights on the CPU: many boxes in one call. See low_rank.h for what is computed.
//
// A box is cut into panels of at most kPanel columns. The right factor of a panel is laid out anew, column beside column,
// and stays in the cache while all rows of the panel are computed, kRows at a time.

// A product and the sum that takes it must not become one operation, which rounds once. GCC joins them in C++ unless it
// is told not to; Clang does so within one expression only, and there is none here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "convert.h"
#include "lanes.h"
#include "low_rank.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using namespace hybrid_rl::low_rank;
using namespace hybrid_rl::strided;
using hybrid_rl::Floats;
using hybrid_rl::kLanes;
using hybrid_rl::Words;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPanel = 512; // columns
constexpr int64_t kRows = 4;
constexpr int64_t kUnitRows = 64; // rows of a panel that a thread takes at once
constexpr int64_t kSerial = 1 << 16; // multiplications below which threads cost more than they bring

template <int kWidth>
HYBRID_RL_INLINE void accumulate_as(const float* left, const float* right, int64_t rank, int64_t columns, float* sums) {
  using V = typename hybrid_rl::Lanes<kWidth>::Floats;
  for (int64_t at = 0; at < columns; at += 2 * kWidth) {
    V first[kRows] = {};
    V second[kRows] = {};
    for (int64_t k = 0; k < rank; ++k) {
      const V a = hybrid_rl::load<kWidth>(right + k * kPanel + at);
      const V b = hybrid_rl::load<kWidth>(right + k * kPanel + at + kWidth);
#pragma GCC unroll 4
      for (int64_t row = 0; row < kRows; ++row) {
        const float factor = left[row * rank + k];
        const V one = factor * a;
        const V other = factor * b;
        first[row] = first[row] + one;
        second[row] = second[row] + other;
      }
    }
#pragma GCC unroll 4
    for (int64_t row = 0; row < kRows; ++row) {
      hybrid_rl::store(sums + row * kPanel + at, first[row]);
      hybrid_rl::store(sums + row * kPanel + at + kWidth, second[row]);
    }
  }
}

// The sums of kRows rows over a panel. left: the rows' factors, [kRows, rank]; right: [rank, kPanel], of which `columns`
// count; sums: [kRows, kPanel].
HYBRID_RL_PER_WIDTH(
    void accumulate(const float* left, const float* right, int64_t rank, int64_t columns, float* sums),
    { accumulate_as<kWidth>(left, right, rank, columns, sums); })

template <int32_t kType>
HYBRID_RL_INLINE void store_lanes(char* target, Words bits) {
  if constexpr (size_of(kType) == 4) {
    std::memcpy(target, &bits, sizeof(bits));
  } else {
    const Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(target, &halves, sizeof(halves));
  }
}

// Sixteen finished elements. Their NaNs become the canonical one, whatever the machine made of them.
template <int32_t kFrom, int32_t kTo>
HYBRID_RL_INLINE void finish(const char* base, char* target, const Floats& sums, const Floats& factors, bool scales) {
  Floats values = sums + as_floats(convert<kFrom, kFloat>(load_bits<kFrom>(base)));
  if (scales) {
    values = values * factors;
  }
  Words bits = as_words(values);
  bits = choose(above(bits & 0x7FFFFFFFu, 0x7F800000u), Words{} + 0x7FC00000u, bits);
  store_lanes<kTo>(target, convert<kFloat, kTo>(bits));
}

// A row of a panel: base and destination run through, or lie `base_step` and `step` elements apart.
template <int32_t kFrom, int32_t kTo>
HYBRID_RL_INLINE void finish_row(
    const char* base, int64_t base_step, char* target, int64_t step, const float* sums, int64_t columns,
    const float* factor, int64_t factor_step) {
  constexpr int64_t from = size_of(kFrom), to = size_of(kTo);
  for (int64_t at = 0; at < columns; at += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, columns - at);
    const Floats lanes = hybrid_rl::load(sums + at);
    Floats factors = Floats{};
    for (int64_t i = 0; factor != nullptr && i < count; ++i) {
      factors[i] = factor[(at + i) * factor_step];
    }
    if (count == kLanes && base_step == 1 && step == 1) {
      finish<kFrom, kTo>(base + at * from, target + at * to, lanes, factors, factor != nullptr);
      continue;
    }
    alignas(64) char read[kLanes * from] = {};
    alignas(64) char written[kLanes * to];
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(read + i * from, base + (at + i) * base_step * from, from);
    }
    finish<kFrom, kTo>(read, written, lanes, factors, factor != nullptr);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(target + (at + i) * step * to, written + i * to, to);
    }
  }
}

#define HYBRID_RL_FINISH(name, from, to) \
  HYBRID_RL_TARGETS void name( \
      const char* base, int64_t base_step, char* target, int64_t step, const float* sums, int64_t columns, \
      const float* factor, int64_t factor_step) { \
    finish_row<from, to>(base, base_step, target, step, sums, columns, factor, factor_step); \
  }
HYBRID_RL_FINISH(finish_ff, kFloat, kFloat)
HYBRID_RL_FINISH(finish_fb, kFloat, kBFloat16)
HYBRID_RL_FINISH(finish_fh, kFloat, kHalf)
HYBRID_RL_FINISH(finish_bf, kBFloat16, kFloat)
HYBRID_RL_FINISH(finish_bb, kBFloat16, kBFloat16)
HYBRID_RL_FINISH(finish_bh, kBFloat16, kHalf)
HYBRID_RL_FINISH(finish_hf, kHalf, kFloat)
HYBRID_RL_FINISH(finish_hb, kHalf, kBFloat16)
HYBRID_RL_FINISH(finish_hh, kHalf, kHalf)
#undef HYBRID_RL_FINISH

using FinishRow = void (*)(const char*, int64_t, char*, int64_t, const float*, int64_t, const float*, int64_t);
constexpr FinishRow kFinish[3][3] = {
    {finish_ff, finish_fb, finish_fh}, {finish_bf, finish_bb, finish_bh}, {finish_hf, finish_hb, finish_hh}};

// A box, cut into units: a few rows of a panel of an expert.
class Cut {
 public:
  explicit Cut(const Merge& merge)
      : m_(merge),
        panels_((merge.shape[2] + kPanel - 1) / kPanel),
        groups_((merge.shape[1] + kUnitRows - 1) / kUnitRows),
        finish_(kFinish[merge.base_type - kFloat][merge.destination_type - kFloat]) {}

  int64_t num_units() const {
    return m_.shape[0] * panels_ * groups_;
  }

  int64_t work() const {
    return m_.shape[0] * m_.shape[1] * m_.shape[2] * (m_.rank + 1);
  }

  // right: room for [rank, kPanel]. Neighbouring units share a panel, whose right factor is laid out once.
  void run(int64_t begin, int64_t end, std::vector<float>& right) const {
    right.resize(static_cast<size_t>(std::max<int64_t>(m_.rank, 1) * kPanel));
    std::vector<float> left(static_cast<size_t>(kRows * std::max<int64_t>(m_.rank, 1)));
    alignas(64) float sums[kRows * kPanel];
    int64_t laid_out = -1;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = unit / groups_, expert = panel / panels_, first = panel % panels_ * kPanel;
      const int64_t columns = std::min(kPanel, m_.shape[2] - first);
      if (panel != laid_out) {
        lay_out(expert, first, columns, right.data());
        laid_out = panel;
      }
      const int64_t top = unit % groups_ * kUnitRows, bottom = std::min(top + kUnitRows, m_.shape[1]);
      for (int64_t row = top; row < bottom; row += kRows) {
        const int64_t count = std::min(kRows, bottom - row);
        for (int64_t i = 0; i < kRows; ++i) {
          const float* line = m_.left + expert * m_.left_strides[0] + (row + std::min(i, count - 1)) * m_.left_strides[1];
          for (int64_t k = 0; k < m_.rank; ++k) {
            left[i * m_.rank + k] = line[k * m_.left_strides[2]];
          }
        }
        accumulate(left.data(), right.data(), m_.rank, columns, sums);
        for (int64_t i = 0; i < count; ++i) {
          finish(expert, row + i, first, columns, sums + i * kPanel);
        }
      }
    }
  }

 private:
  void lay_out(int64_t expert, int64_t first, int64_t columns, float* right) const {
    const float* corner = m_.right + expert * m_.right_strides[0] + first * m_.right_strides[1];
    for (int64_t k = 0; k < m_.rank; ++k) {
      for (int64_t i = 0; i < columns; ++i) {
        right[k * kPanel + i] = corner[k * m_.right_strides[2] + i * m_.right_strides[1]];
      }
      std::fill(right + k * kPanel + columns, right + (k + 1) * kPanel, 0.0f);
    }
  }

  void finish(int64_t expert, int64_t row, int64_t first, int64_t columns, const float* sums) const {
    const auto place = [&](const int64_t* strides, int32_t type) {
      return (expert * strides[0] + row * strides[1] + first * strides[2]) * size_of(type);
    };
    const float* factor =
        m_.factor == nullptr ? nullptr : m_.factor + row * m_.factor_strides[0] + first * m_.factor_strides[1];
    finish_(
        m_.base + place(m_.base_strides, m_.base_type), m_.base_strides[2],
        m_.destination + place(m_.destination_strides, m_.destination_type), m_.destination_strides[2], sums, columns,
        factor, m_.factor_strides[1]);
  }

  Merge m_;
  int64_t panels_, groups_;
  FinishRow finish_;
};

// Addresses are the caller's word. marker: of any shape and dtype; it says on which device the memory is.
void low_rank_merge(const Tensor& table, const Tensor& marker) {
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(1) == hybrid_rl::low_rank::kNumColumns && table.scalar_type() == ScalarType::Long &&
          table.is_contiguous(),
      "hybrid_rl::low_rank_merge: table must be contiguous int64 [P, ", static_cast<int64_t>(hybrid_rl::low_rank::kNumColumns), "]");
  (void)marker;
  const int64_t* row = static_cast<const int64_t*>(table.const_data_ptr());
  std::vector<Cut> cuts;
  std::vector<int64_t> starts{0}; // units before each box
  int64_t work = 0;
  for (int64_t i = 0; i < table.size(0); ++i, row += hybrid_rl::low_rank::kNumColumns) {
    const Cut cut(merge_of(row));
    if (cut.work() > 0) {
      cuts.push_back(cut);
      starts.push_back(starts.back() + cut.num_units());
      work += cut.work();
    }
  }
  const int64_t num_units = starts.back();
  const int64_t shares = work < kSerial ? 1 : std::min<int64_t>(num_units, 8 * torch::stable::get_num_threads());
  torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * num_units / shares, to = end * num_units / shares;
    std::vector<float> right;
    size_t i = std::upper_bound(starts.begin(), starts.end(), from) - starts.begin() - 1;
    for (; i < cuts.size() && starts[i] < to; ++i) {
      cuts[i].run(std::max(from, starts[i]) - starts[i], std::min(to, starts[i + 1]) - starts[i], right);
    }
  });
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("low_rank_merge(Tensor table, Tensor marker) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("low_rank_merge", TORCH_BOX(&low_rank_merge));
}
