// Small operations of a transformer's layers and of its head in one pass over memory each: RMSNorm, the gate of a
// SwiGLU, and log-probabilities with their gradient. float32 on the CPU; what PyTorch needs several operators for, each
// of which writes and reads its intermediate result. The PyTorch forms are the oracles (hybrid_rl/models/fused.py,
// hybrid_rl/models/heads/logprobs.py). A row's result does not depend on which other rows there are, nor on the number of
// threads.

#include "lanes.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

namespace {

using hybrid_rl::Lanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kNumbersPerTask = 1 << 15; // about 10 microseconds
constexpr int64_t kBlock = 1024; // columns whose sum is kept in float32: sums of blocks are added in double
constexpr int64_t kRowsPerPart = 256; // rows whose share in the gradient of a norm's weight is added up by one task

// --------------------------------------------------------------------------------------------------------- RMSNorm

// out = (weight + offset) * (x * scale), scale = (mean(x^2) + epsilon)^-1/2, which is returned.
template <int W>
HYBRID_RL_INLINE float norm_row_by(
    const float* x,
    const float* weight,
    int64_t size,
    double epsilon,
    float offset,
    float* out) {
  using V = typename Lanes<W>::Floats;
  double total = 0.0;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = std::min(size, first + kBlock);
    V sums = {};
    int64_t i = first;
    for (; i + W <= end; i += W) {
      const V lanes = hybrid_rl::load<W>(x + i);
      sums += lanes * lanes;
    }
    float sum = hybrid_rl::sum_of(sums);
    for (; i < end; ++i) {
      sum += x[i] * x[i];
    }
    total += sum;
  }
  const float scale = static_cast<float>(1.0 / std::sqrt(total / static_cast<double>(size) + epsilon));
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const V scaled = hybrid_rl::load<W>(x + i) * scale;
    hybrid_rl::store(out + i, (hybrid_rl::load<W>(weight + i) + offset) * scaled);
  }
  for (; i < size; ++i) {
    out[i] = (weight[i] + offset) * (x[i] * scale);
  }
  return scale;
}

HYBRID_RL_PER_WIDTH(
    float norm_row(
        const float* x,
        const float* weight,
        int64_t size,
        double epsilon,
        float offset,
        float* out),
    { return norm_row_by<kWidth>(x, weight, size, epsilon, offset, out); })

// With g = grad * (weight + offset): grad_x = scale * (g - x * scale^2 * mean(g * x)); adds grad * x * scale to
// grad_weight, unless that is null.
template <int W>
HYBRID_RL_INLINE void norm_row_backward_by(
    const float* grad,
    const float* x,
    const float* weight,
    int64_t size,
    float scale,
    float offset,
    float* grad_x,
    float* grad_weight) {
  using V = typename Lanes<W>::Floats;
  double total = 0.0;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = std::min(size, first + kBlock);
    V sums = {};
    int64_t i = first;
    for (; i + W <= end; i += W) {
      const V g = hybrid_rl::load<W>(grad + i) * (hybrid_rl::load<W>(weight + i) + offset);
      sums += g * hybrid_rl::load<W>(x + i);
    }
    float sum = hybrid_rl::sum_of(sums);
    for (; i < end; ++i) {
      sum += grad[i] * (weight[i] + offset) * x[i];
    }
    total += sum;
  }
  const float pull =
      static_cast<float>(total / static_cast<double>(size) * static_cast<double>(scale) * static_cast<double>(scale));
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const V lanes = hybrid_rl::load<W>(x + i);
    const V up = hybrid_rl::load<W>(grad + i);
    const V g = up * (hybrid_rl::load<W>(weight + i) + offset);
    hybrid_rl::store(grad_x + i, (g - lanes * pull) * scale);
    if (grad_weight != nullptr) {
      hybrid_rl::store(grad_weight + i, hybrid_rl::load<W>(grad_weight + i) + up * (lanes * scale));
    }
  }
  for (; i < size; ++i) {
    const float g = grad[i] * (weight[i] + offset);
    grad_x[i] = (g - x[i] * pull) * scale;
    if (grad_weight != nullptr) {
      grad_weight[i] += grad[i] * (x[i] * scale);
    }
  }
}

HYBRID_RL_PER_WIDTH(
    void norm_row_backward(
        const float* grad,
        const float* x,
        const float* weight,
        int64_t size,
        float scale,
        float offset,
        float* grad_x,
        float* grad_weight),
    { norm_row_backward_by<kWidth>(grad, x, weight, size, scale, offset, grad_x, grad_weight); })

// ------------------------------------------------------------------------------------------------ gate of a SwiGLU

template <int W>
HYBRID_RL_INLINE typename Lanes<W>::Floats sigmoid(typename Lanes<W>::Floats x) {
  using V = typename Lanes<W>::Floats;
  using Ints = typename Lanes<W>::Ints;
  Ints bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const Ints sign = bits >> 31; // all ones where x is negative
  bits |= static_cast<int32_t>(0x80000000u);
  V negative; // -|x|
  std::memcpy(&negative, &bits, sizeof(bits));
  const V power = hybrid_rl::exp_of_nonpositive(negative);
  const V one = V{} + 1.0f;
  Ints power_bits, one_bits;
  std::memcpy(&power_bits, &power, sizeof(bits));
  std::memcpy(&one_bits, &one, sizeof(bits));
  const Ints chosen = (power_bits & sign) | (one_bits & ~sign);
  V numerator;
  std::memcpy(&numerator, &chosen, sizeof(bits));
  return numerator / (one + power);
}

// out = gate * sigmoid(gate) * up
template <int W>
HYBRID_RL_INLINE void gate_run_by(const float* gate, const float* up, int64_t size, float* out) {
  using V = typename Lanes<W>::Floats;
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const V lanes = hybrid_rl::load<W>(gate + i);
    hybrid_rl::store(out + i, lanes * sigmoid<W>(lanes) * hybrid_rl::load<W>(up + i));
  }
  if (i < size) {
    float rest[3][W] = {};
    std::copy(gate + i, gate + size, rest[0]);
    std::copy(up + i, up + size, rest[1]);
    const V lanes = hybrid_rl::load<W>(rest[0]);
    hybrid_rl::store(rest[2], lanes * sigmoid<W>(lanes) * hybrid_rl::load<W>(rest[1]));
    std::copy_n(rest[2], size - i, out + i);
  }
}

HYBRID_RL_PER_WIDTH(
    void gate_run(
        const float* gate,
        const float* up,
        int64_t size,
        float* out),
    { gate_run_by<kWidth>(gate, up, size, out); })

// With s = sigmoid(gate): grad_up = grad * gate * s, grad_gate = grad * up * s * (1 + gate * (1 - s)).
template <int W>
HYBRID_RL_INLINE void gate_run_backward_by(
    const float* grad,
    const float* gate,
    const float* up,
    int64_t size,
    float* grad_gate,
    float* grad_up) {
  using V = typename Lanes<W>::Floats;
  for (int64_t i = 0; i < size; i += W) {
    float rest[5][W] = {};
    const bool is_whole = i + W <= size;
    const int64_t count = is_whole ? W : size - i;
    if (!is_whole) {
      std::copy_n(grad + i, count, rest[0]);
      std::copy_n(gate + i, count, rest[1]);
      std::copy_n(up + i, count, rest[2]);
    }
    const V g = hybrid_rl::load<W>(is_whole ? grad + i : rest[0]);
    const V x = hybrid_rl::load<W>(is_whole ? gate + i : rest[1]);
    const V u = hybrid_rl::load<W>(is_whole ? up + i : rest[2]);
    const V s = sigmoid<W>(x);
    hybrid_rl::store(is_whole ? grad_gate + i : rest[3], g * u * s * (x * (1.0f - s) + 1.0f));
    hybrid_rl::store(is_whole ? grad_up + i : rest[4], g * x * s);
    if (!is_whole) {
      std::copy_n(rest[3], count, grad_gate + i);
      std::copy_n(rest[4], count, grad_up + i);
    }
  }
}

HYBRID_RL_PER_WIDTH(
    void gate_run_backward(
        const float* grad,
        const float* gate,
        const float* up,
        int64_t size,
        float* grad_gate,
        float* grad_up),
    { gate_run_backward_by<kWidth>(grad, gate, up, size, grad_gate, grad_up); })

// ---------------------------------------------------------------------------------------------- log-probabilities

struct Distribution {
  float log_sum; // of exp(logits * inverse_temperature)
  float entropy;
};

// Columns beyond `size` count as excluded.
template <int W>
HYBRID_RL_INLINE typename Lanes<W>::Floats some(const float* source, int64_t size, float* rest) {
  if (size >= W) {
    return hybrid_rl::load<W>(source);
  }
  std::fill_n(rest, W, -std::numeric_limits<float>::infinity());
  std::copy_n(source, size, rest);
  return hybrid_rl::load<W>(rest);
}

template <int W>
HYBRID_RL_INLINE Distribution distribution_of_by(const float* logits, int64_t size, float inverse_temperature) {
  using V = typename Lanes<W>::Floats;
  float rest[W];
  V tops = some<W>(logits, size, rest);
  for (int64_t i = W; i < size; i += W) {
    const V lanes = some<W>(logits + i, size - i, rest);
    tops = lanes > tops ? lanes : tops;
  }
  float top = tops[0];
  for (int lane = 1; lane < W; ++lane) {
    top = tops[lane] > top ? tops[lane] : top;
  }
  double total = 0.0;
  double weighted = 0.0; // sum of exp(d) * d, d = (logit - top) / temperature
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = std::min(size, first + kBlock);
    V sums = {};
    V products = {};
    for (int64_t i = first; i < end; i += W) {
      const V below = (some<W>(logits + i, end - i, rest) - top) * inverse_temperature;
      const V power = hybrid_rl::exp_of_nonpositive(below);
      sums += power;
      products += power * (below < -200.0f ? V{} - 200.0f : below); // an excluded column: 0 * 200, not NaN
    }
    total += hybrid_rl::sum_of(sums);
    weighted += hybrid_rl::sum_of(products);
  }
  const double log_total = std::log(total);
  return {
      static_cast<float>(static_cast<double>(top) * inverse_temperature + log_total),
      static_cast<float>(log_total - weighted / total)};
}

HYBRID_RL_PER_WIDTH(
    Distribution distribution_of(
        const float* logits,
        int64_t size,
        float inverse_temperature),
    { return distribution_of_by<kWidth>(logits, size, inverse_temperature); })

// logits := scale * (up * (onehot(label) - p) - up_entropy * p * (ln p + entropy))
template <int W>
HYBRID_RL_INLINE void gradient_row_by(
    float* logits,
    int64_t size,
    int64_t label,
    Distribution about,
    float inverse_temperature,
    float up,
    float up_entropy,
    float scale) {
  using V = typename Lanes<W>::Floats;
  float rest[W];
  for (int64_t i = 0; i < size; i += W) {
    const V log_p = some<W>(logits + i, size - i, rest) * inverse_temperature - about.log_sum;
    const V bounded = log_p < -200.0f ? V{} - 200.0f : log_p;
    const V at_most_one = bounded > 0.0f ? V{} : bounded; // rounding may leave ln p just above 0
    const V p = hybrid_rl::exp_of_nonpositive(at_most_one);
    const V gradient = -(p * (up + up_entropy * (at_most_one + about.entropy))) * scale;
    if (size - i >= W) {
      hybrid_rl::store(logits + i, gradient);
    } else {
      hybrid_rl::store(rest, gradient);
      std::copy_n(rest, size - i, logits + i);
    }
  }
  logits[label] += up * scale;
}

HYBRID_RL_PER_WIDTH(
    void gradient_row(
        float* logits,
        int64_t size,
        int64_t label,
        Distribution about,
        float inverse_temperature,
        float up,
        float up_entropy,
        float scale),
    { gradient_row_by<kWidth>(logits, size, label, about, inverse_temperature, up, up_entropy, scale); })

// ----------------------------------------------------------------------------------------------------- operators

const float* floats(const Tensor& tensor) {
  return static_cast<const float*>(tensor.const_data_ptr());
}

float* writable(Tensor& tensor) {
  return static_cast<float*>(tensor.mutable_data_ptr());
}

void check(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(),
      "hybrid_rl: ",
      name,
      " must be contiguous float32");
}

void check_like(const Tensor& tensor, const Tensor& other, const char* name) {
  check(tensor, name);
  STD_TORCH_CHECK(tensor.numel() == other.numel(), "hybrid_rl: ", name, " has another number of elements");
}

Tensor like(const Tensor& tensor) {
  std::vector<int64_t> sizes(tensor.dim());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    sizes[dim] = tensor.size(dim);
  }
  return torch::stable::new_empty(tensor, {sizes.data(), sizes.size()}, ScalarType::Float);
}

int64_t columns_of(const Tensor& rows, const Tensor& weight) {
  check(rows, "rows");
  check(weight, "weight");
  const int64_t size = weight.numel();
  STD_TORCH_CHECK(
      rows.dim() >= 1 && size >= 1 && rows.size(rows.dim() - 1) == size, "hybrid_rl: rows must be [..., ", size, "]");
  return size;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& rows, const Tensor& weight, double epsilon, double offset) {
  const int64_t size = columns_of(rows, weight), num_rows = rows.numel() / size;
  Tensor out = like(rows);
  Tensor scales = torch::stable::new_empty(rows, {&num_rows, 1}, ScalarType::Float);
  const float *x = floats(rows), *w = floats(weight);
  float *y = writable(out), *scale = writable(scales);
  torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, kNumbersPerTask / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale[row] = norm_row(x + row * size, w, size, epsilon, static_cast<float>(offset), y + row * size);
    }
  });
  return {out, scales};
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad,
    const Tensor& rows,
    const Tensor& weight,
    const Tensor& scales,
    double offset,
    bool wants_weight) {
  const int64_t size = columns_of(rows, weight), num_rows = rows.numel() / size;
  check_like(grad, rows, "grad");
  check(scales, "scales");
  STD_TORCH_CHECK(scales.numel() == num_rows, "hybrid_rl: scales must be [", num_rows, "]");
  Tensor grad_rows = like(rows);
  const int64_t num_weights = wants_weight ? size : 0;
  Tensor grad_weight = torch::stable::new_empty(rows, {&num_weights, 1}, ScalarType::Float);
  // Parts of the rows rather than threads: the sum is the same on any number of cores.
  const int64_t num_parts = (num_rows + kRowsPerPart - 1) / kRowsPerPart;
  std::vector<float> parts(static_cast<size_t>(num_parts * num_weights), 0.0f);
  const float *g = floats(grad), *x = floats(rows), *w = floats(weight), *scale = floats(scales);
  float* gx = writable(grad_rows);
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* sums = wants_weight ? parts.data() + part * size : nullptr;
      for (int64_t row = part * kRowsPerPart; row < std::min(num_rows, (part + 1) * kRowsPerPart); ++row) {
        const int64_t start = row * size;
        norm_row_backward(g + start, x + start, w, size, scale[row], static_cast<float>(offset), gx + start, sums);
      }
    }
  });
  float* gw = writable(grad_weight);
  for (int64_t column = 0; column < num_weights; ++column) {
    double sum = 0.0;
    for (int64_t part = 0; part < num_parts; ++part) {
      sum += parts[static_cast<size_t>(part * size + column)];
    }
    gw[column] = static_cast<float>(sum);
  }
  return {grad_rows, grad_weight};
}

Tensor silu_gate(const Tensor& gate, const Tensor& up) {
  check(gate, "gate");
  check_like(up, gate, "up");
  Tensor out = like(gate);
  const float *x = floats(gate), *u = floats(up);
  float* y = writable(out);
  torch::stable::parallel_for(0, gate.numel(), kNumbersPerTask, [&](int64_t begin, int64_t end) {
    gate_run(x + begin, u + begin, end - begin, y + begin);
  });
  return out;
}

std::tuple<Tensor, Tensor> silu_gate_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check(gate, "gate");
  check_like(up, gate, "up");
  check_like(grad, gate, "grad");
  Tensor grad_gate = like(gate);
  Tensor grad_up = like(gate);
  const float *g = floats(grad), *x = floats(gate), *u = floats(up);
  float *gx = writable(grad_gate), *gu = writable(grad_up);
  torch::stable::parallel_for(0, gate.numel(), kNumbersPerTask, [&](int64_t begin, int64_t end) {
    gate_run_backward(g + begin, x + begin, u + begin, end - begin, gx + begin, gu + begin);
  });
  return {grad_gate, grad_up};
}

int64_t check_head(const Tensor& logits, const Tensor& labels) {
  check(logits, "logits");
  STD_TORCH_CHECK(
      logits.dim() == 2 && logits.size(1) >= 1 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
          labels.scalar_type() == ScalarType::Long && labels.is_contiguous(),
      "hybrid_rl: logits must be [M, V], labels int64 [M]");
  const int64_t* label = static_cast<const int64_t*>(labels.const_data_ptr());
  for (int64_t row = 0; row < labels.size(0); ++row) {
    STD_TORCH_CHECK(
        label[row] >= 0 && label[row] < logits.size(1),
        "hybrid_rl: label ",
        label[row],
        " is not below the vocabulary of ",
        logits.size(1));
  }
  return logits.size(1);
}

std::tuple<Tensor, Tensor, Tensor> label_logprobs(
    const Tensor& logits,
    const Tensor& labels,
    double inverse_temperature) {
  const int64_t size = check_head(logits, labels), num_rows = logits.size(0);
  Tensor logprobs = torch::stable::new_empty(logits, {&num_rows, 1}, ScalarType::Float);
  Tensor entropies = torch::stable::new_empty(logits, {&num_rows, 1}, ScalarType::Float);
  Tensor log_sums = torch::stable::new_empty(logits, {&num_rows, 1}, ScalarType::Float);
  const float* z = floats(logits);
  const int64_t* label = static_cast<const int64_t*>(labels.const_data_ptr());
  float *logprob = writable(logprobs), *entropy = writable(entropies), *log_sum = writable(log_sums);
  const float inverse = static_cast<float>(inverse_temperature);
  torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, kNumbersPerTask / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Distribution about = distribution_of(z + row * size, size, inverse);
      log_sum[row] = about.log_sum;
      entropy[row] = about.entropy;
      // In double, where the product is exact, so that it does not matter whether the compiler fuses the two.
      logprob[row] = static_cast<float>(static_cast<double>(z[row * size + label[row]]) * inverse - about.log_sum);
    }
  });
  return {logprobs, entropies, log_sums};
}

void label_logprobs_backward(
    Tensor logits,
    const Tensor& labels,
    const Tensor& log_sums,
    const Tensor& entropies,
    const Tensor& grad_logprobs,
    const Tensor& grad_entropies,
    double inverse_temperature) {
  const int64_t size = check_head(logits, labels), num_rows = logits.size(0);
  check_like(log_sums, labels, "log_sums");
  check_like(entropies, labels, "entropies");
  check_like(grad_logprobs, labels, "grad_logprobs");
  check_like(grad_entropies, labels, "grad_entropies");
  float* z = writable(logits);
  const int64_t* label = static_cast<const int64_t*>(labels.const_data_ptr());
  const float *log_sum = floats(log_sums), *entropy = floats(entropies);
  const float *up = floats(grad_logprobs), *up_entropy = floats(grad_entropies);
  const float inverse = static_cast<float>(inverse_temperature);
  torch::stable::parallel_for(0, num_rows, std::max<int64_t>(1, kNumbersPerTask / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Distribution about{log_sum[row], entropy[row]};
      gradient_row(z + row * size, size, label[row], about, inverse, up[row], up_entropy[row], inverse);
    }
  });
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("rms_norm(Tensor rows, Tensor weight, float epsilon, float offset) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor grad, Tensor rows, Tensor weight, Tensor scales, float offset, bool wants_weight) -> "
      "(Tensor, Tensor)");
  library.def("silu_gate(Tensor gate, Tensor up) -> Tensor");
  library.def("silu_gate_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("label_logprobs(Tensor logits, Tensor labels, float inverse_temperature) -> (Tensor, Tensor, Tensor)");
  library.def(
      "label_logprobs_backward(Tensor(a!) logits, Tensor labels, Tensor log_sums, Tensor entropies, Tensor grad_logprobs, "
      "Tensor grad_entropies, float inverse_temperature) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("silu_gate", TORCH_BOX(&silu_gate));
  library.impl("silu_gate_backward", TORCH_BOX(&silu_gate_backward));
  library.impl("label_logprobs", TORCH_BOX(&label_logprobs));
  library.impl("label_logprobs_backward", TORCH_BOX(&label_logprobs_backward));
}
