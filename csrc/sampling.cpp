// From logits to tokens on the CPU. The uniform number of a token is a pure function of (seed, position):
// Philox-4x32-10, J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A sampled token therefore
// does not depend on which other requests share its batch. The PyTorch forms of both operators are their oracles
// (hybrid_rl/compat/native.py, hybrid_rl/engines/sampling.py): the noise agrees bit for bit, the tokens up to floating-point
// ties.
//
// Built on LibTorch's stable ABI (no Python.h, no ATen headers): one binary serves several versions of both.

#include "lanes.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace {

using hybrid_rl::kLanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr uint32_t kDomain = 0x48524Cu; // "HRL": keeps this stream apart from other uses of the same seed
// Maxima and sums side by side, so that the compiler vectorises. With 16 or fewer, GCC unrolls the loops whole before.
constexpr int kNumLanes = 64;
constexpr int64_t kBlock = 1024; // columns of one partial sum: the search for the token repeats one block only
constexpr int64_t kColumnsPerTask = 16384; // about 10 microseconds

struct Words {
  uint32_t word[4];
};

Words philox(uint64_t seed, uint64_t position, uint32_t block) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = block, c3 = kDomain;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 23 bits: with 24, x + 0.5 has no exact float32 and the largest value would round to 1.
float uniform(uint32_t word) {
  return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
}

// The largest of a block's logits; NaN where one of them is NaN or +inf.
HYBRID_RL_TARGETS
float block_max(const float* logits, int64_t size) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  float best[kNumLanes];
  int32_t broken[kNumLanes];
  for (int lane = 0; lane < kNumLanes; ++lane) {
    best[lane] = -std::numeric_limits<float>::infinity();
    broken[lane] = 0;
  }
  int64_t first = 0;
  for (; first + kNumLanes <= size; first += kNumLanes) {
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const float x = logits[first + lane];
      best[lane] = x > best[lane] ? x : best[lane];
      broken[lane] |= x <= kLargest ? 0 : 1;
    }
  }
  for (; first < size; ++first) {
    best[0] = logits[first] > best[0] ? logits[first] : best[0];
    broken[0] |= logits[first] <= kLargest ? 0 : 1;
  }
  for (int lane = 1; lane < kNumLanes && size >= kNumLanes; ++lane) {
    best[0] = best[lane] > best[0] ? best[lane] : best[0];
    broken[0] |= broken[lane];
  }
  return broken[0] ? std::numeric_limits<float>::quiet_NaN() : best[0];
}

// weights[i] = e^((logits[i] - best) / temperature); returns their sum.
HYBRID_RL_TARGETS
double block_weights(const float* logits, int64_t size, float best, float inverse_temperature, float* weights) {
  int64_t first = 0;
  for (; first + kLanes <= size; first += kLanes) {
    hybrid_rl::store(
        weights + first,
        hybrid_rl::exp_of_nonpositive((hybrid_rl::load(logits + first) - best) * inverse_temperature));
  }
  if (first < size) {
    float rest[kLanes];
    std::fill_n(rest, kLanes, -std::numeric_limits<float>::infinity());
    std::copy(logits + first, logits + size, rest);
    hybrid_rl::store(rest, hybrid_rl::exp_of_nonpositive((hybrid_rl::load(rest) - best) * inverse_temperature));
    std::copy_n(rest, size - first, weights + first);
  }
  // In double: next to a sum of 1, float32 would lose the tokens below p = 1e-7.
  double sums[kNumLanes] = {};
  for (first = 0; first + kNumLanes <= size; first += kNumLanes) {
    for (int lane = 0; lane < kNumLanes; ++lane) {
      sums[lane] += weights[first + lane];
    }
  }
  double sum = 0.0;
  for (int lane = 0; lane < kNumLanes && size >= kNumLanes; ++lane) {
    sum += sums[lane];
  }
  for (; first < size; ++first) {
    sum += weights[first];
  }
  return sum;
}

// Finds the token of one row after another; holds the memory for it.
class Row {
 public:
  explicit Row(int64_t num_columns) : num_columns_(num_columns), maxima_(num_blocks()), sums_(num_blocks()) {}

  // Chooses a token (temperature 0: the best one) and returns ln p of it; NaN where there is no distribution: a logit
  // is NaN or +inf, or none is above -inf.
  float choose(const float* logits, float temperature, uint64_t seed, uint64_t position, int64_t* token) {
    *token = 0;
    float best = -std::numeric_limits<float>::infinity();
    for (int64_t block = 0; block < num_blocks(); ++block) {
      maxima_[block] = block_max(logits + block * kBlock, size(block));
      // Written so that a NaN, once taken, stays.
      best = maxima_[block] <= best ? best : std::isnan(best) ? best : maxima_[block];
    }
    const bool greedy = !(temperature > 0.0f);
    const float divisor = greedy ? 1.0f : temperature;
    if (!std::isfinite(best / divisor)) {
      return std::numeric_limits<float>::quiet_NaN();
    }
    double total = 0.0;
    for (int64_t block = 0; block < num_blocks(); ++block) {
      sums_[block] = block_weights(logits + block * kBlock, size(block), best, 1.0f / divisor, weights_);
      total += sums_[block];
    }
    *token = greedy ? first_best(logits, best) : search(logits, best, 1.0f / divisor, draw(seed, position) * total);
    return static_cast<float>((static_cast<double>(logits[*token]) - best) / divisor - std::log(total));
  }

 private:
  int64_t num_blocks() const {
    return (num_columns_ + kBlock - 1) / kBlock;
  }

  int64_t size(int64_t block) const {
    return std::min(kBlock, num_columns_ - block * kBlock);
  }

  // Two words make one fine-grained number: 23 bits alone would never draw a token below p = 1e-7.
  static double draw(uint64_t seed, uint64_t position) {
    const Words words = philox(seed, position, 0);
    return uniform(words.word[0]) + (static_cast<double>(uniform(words.word[1])) - 0.5) * 0x1p-23;
  }

  int64_t first_best(const float* logits, float best) const {
    const int64_t start = (std::find(maxima_.begin(), maxima_.end(), best) - maxima_.begin()) * kBlock;
    return std::find(logits + start, logits + num_columns_, best) - logits;
  }

  // The first column whose cumulative weight reaches `target`, which is above 0 and at most the sum of all.
  int64_t search(const float* logits, float best, float inverse_temperature, double target) {
    int64_t block = 0;
    double cumulative = 0.0;
    while (cumulative + sums_[block] < target && block + 1 < num_blocks()) {
      cumulative += sums_[block++];
    }
    // The weights of the last block are still there.
    if (block + 1 < num_blocks()) {
      block_weights(logits + block * kBlock, size(block), best, inverse_temperature, weights_);
    }
    // The block's sum was rounded in another order: where that leaves the target just out of reach, its last possible
    // token is meant.
    int64_t last_possible = 0;
    for (int64_t column = 0; column < size(block); ++column) {
      cumulative += weights_[column];
      if (weights_[column] > 0.0f) {
        last_possible = column;
        if (cumulative >= target) {
          break;
        }
      }
    }
    return block * kBlock + last_possible;
  }

  int64_t num_columns_;
  std::vector<float> maxima_;
  std::vector<double> sums_;
  float weights_[kBlock];
};

void check_keys(const Tensor& seeds, const Tensor& positions) {
  STD_TORCH_CHECK(
      seeds.dim() == 1 && positions.dim() == 1 && seeds.size(0) == positions.size(0),
      "hybrid_rl: seeds and positions must be one-dimensional and of one length");
  STD_TORCH_CHECK(
      seeds.scalar_type() == ScalarType::Long && positions.scalar_type() == ScalarType::Long,
      "hybrid_rl: seeds and positions must be int64");
  STD_TORCH_CHECK(
      seeds.is_contiguous() && positions.is_contiguous(), "hybrid_rl: seeds and positions must be contiguous");
}

Tensor keyed_uniform(const Tensor& seeds, const Tensor& positions, int64_t num_columns) {
  check_keys(seeds, positions);
  STD_TORCH_CHECK(num_columns >= 1, "hybrid_rl::keyed_uniform: num_columns must be at least 1, got ", num_columns);
  const int64_t num_rows = seeds.size(0);
  const int64_t sizes[2] = {num_rows, num_columns};
  Tensor noise = torch::stable::new_empty(seeds, {sizes, 2}, ScalarType::Float);
  const int64_t* seed = static_cast<const int64_t*>(seeds.const_data_ptr());
  const int64_t* position = static_cast<const int64_t*>(positions.const_data_ptr());
  float* values = static_cast<float*>(noise.mutable_data_ptr());
  const int64_t grain_size = std::max<int64_t>(1, kColumnsPerTask / num_columns);
  torch::stable::parallel_for(0, num_rows, grain_size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Words words;
      for (int64_t column = 0; column < num_columns; ++column) {
        if (column % 4 == 0) {
          words = philox(
              static_cast<uint64_t>(seed[row]),
              static_cast<uint64_t>(position[row]),
              static_cast<uint32_t>(column / 4));
        }
        values[row * num_columns + column] = uniform(words.word[column % 4]);
      }
    }
  });
  return noise;
}

std::tuple<Tensor, Tensor> sample(
    const Tensor& logits,
    const Tensor& temperatures,
    const Tensor& seeds,
    const Tensor& positions) {
  check_keys(seeds, positions);
  STD_TORCH_CHECK(
      logits.dim() == 2 && logits.size(0) == seeds.size(0) && logits.size(1) >= 1,
      "hybrid_rl::sample: logits must be [B, V] with B = ",
      seeds.size(0),
      " and V at least 1");
  STD_TORCH_CHECK(
      temperatures.dim() == 1 && temperatures.size(0) == seeds.size(0),
      "hybrid_rl::sample: temperatures must be [B] with B = ",
      seeds.size(0));
  STD_TORCH_CHECK(
      logits.scalar_type() == ScalarType::Float && temperatures.scalar_type() == ScalarType::Float &&
          logits.is_contiguous() && temperatures.is_contiguous(),
      "hybrid_rl::sample: logits and temperatures must be contiguous float32");
  const int64_t num_rows = logits.size(0), num_columns = logits.size(1);
  Tensor tokens = torch::stable::new_empty(seeds, {&num_rows, 1}, ScalarType::Long);
  Tensor logprobs = torch::stable::new_empty(seeds, {&num_rows, 1}, ScalarType::Float);
  const float* values = static_cast<const float*>(logits.const_data_ptr());
  const float* temperature = static_cast<const float*>(temperatures.const_data_ptr());
  const int64_t* seed = static_cast<const int64_t*>(seeds.const_data_ptr());
  const int64_t* position = static_cast<const int64_t*>(positions.const_data_ptr());
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());
  float* logprob = static_cast<float*>(logprobs.mutable_data_ptr());
  const int64_t grain_size = std::max<int64_t>(1, kColumnsPerTask / num_columns);
  torch::stable::parallel_for(0, num_rows, grain_size, [&](int64_t begin, int64_t end) {
    Row chooser(num_columns);
    for (int64_t row = begin; row < end; ++row) {
      logprob[row] = chooser.choose(
          values + row * num_columns,
          temperature[row],
          static_cast<uint64_t>(seed[row]),
          static_cast<uint64_t>(position[row]),
          token + row);
    }
  });
  return {tokens, logprobs};
}

} // namespace

// A fragment: every source file of the extension declares its own operators in the one namespace.
STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("keyed_uniform(Tensor seeds, Tensor positions, int num_columns) -> Tensor");
  library.def("sample(Tensor logits, Tensor temperatures, Tensor seeds, Tensor positions) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("keyed_uniform", TORCH_BOX(&keyed_uniform));
  library.impl("sample", TORCH_BOX(&sample));
}
