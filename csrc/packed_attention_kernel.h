// Attention within a packed row of a training step, forward and backward. CPU, float32.
//
// A family is a root (a whole sample, or a prompt) and its children (completions of that prompt). A root sees itself,
// causally; a child sees all of its root, then itself, causally: the index of a key in "root, then own" is its position.
// If all sequences of a row begin with the same tokens, these are computed once: the first family is this prefix, and all
// others see it before their root. One task is one family and one key head, so every gradient has one writer: the root's
// keys collect what all of its children send them. What the families send to the prefix is collected by family, and added
// up at the end in their order. Within a task the rows (token, query head) go through in tiles of up to eight.

#pragma once

#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace hybrid_rl::packed {

constexpr int64_t kMaxDim = 512;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t dim) {
  return (dim + kLanes - 1) / kLanes * kLanes;
}

struct Problem {
  const float *query, *key, *value; // [T, H, D], [T, H_kv, D], [T, H_kv, D_v]
  float *out, *lse; // [T, H, D_v], [T, H]; the backward pass reads them
  const float* grad; // [T, H, D_v]; null in the forward pass
  float *grad_query, *grad_key, *grad_value;
  float *prefix_grad_key, *prefix_grad_value; // [F - 1, P, H_kv, D], [F - 1, P, H_kv, D_v], by the family that sends them
  const int64_t* starts; // [N], first token of every segment, in the order of the families
  const int64_t* tokens; // [N], tokens of every segment
  const int64_t* families; // [F + 1], first segment of every family
  int64_t num_families, num_heads, num_kv_heads, key_dim, value_dim;
  int64_t num_prefix; // P, tokens at the front of the row, which are the first family; 0: none
  float scale, softcap; // softcap 0: none
  int64_t window; // 0: none
};

// The memory of a task. Panels are [dim, stride], lanes running over keys; rows are [keys, padded dim].
struct Scratch {
  std::vector<float> memory;
  int64_t stride = 0, key_dim = 0, value_dim = 0; // dims padded
  float *key_panel, *value_panel, *key_rows, *value_rows, *grad_keys, *grad_values, *scores, *slopes;

  void prepare(int64_t num_keys, const Problem& p) {
    stride = padded(num_keys) + 2 * kLanes; // a run of lanes may reach over the end
    key_dim = padded(p.key_dim);
    value_dim = padded(p.value_dim);
    const int64_t rows = stride * (key_dim + value_dim);
    const int64_t panels = stride * (p.key_dim + p.value_dim);
    memory.assign(panels + 2 * rows + 16 * stride, 0.0f);
    float* next = memory.data();
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    key_panel = take(stride * p.key_dim);
    value_panel = take(stride * p.value_dim);
    key_rows = take(stride * key_dim);
    value_rows = take(stride * value_dim);
    grad_keys = take(stride * key_dim);
    grad_values = take(stride * value_dim);
    scores = take(8 * stride);
    slopes = take(8 * stride);
  }
};

// W: floats of a register; G runs of them side by side make sums enough to hide the latency of an addition.
template <int W, int R>
constexpr int kRuns = W == 16 || R < 8 ? 2 : 1;

// result[r, first .. last) = rows[r] . panel, G runs of W keys at a time; surplus lanes are written too.
template <int W, int R>
HYBRID_RL_INLINE void multiply_panel(
    const float* rows, int64_t row_stride, const float* panel, int64_t dim, int64_t stride, int64_t first, int64_t last, float* result) {
  constexpr int G = kRuns<W, R>;
  for (int64_t key = first; key < last; key += G * W) {
    typename Lanes<W>::Floats sums[R][G] = {};
    for (int64_t d = 0; d < dim; ++d) {
      typename Lanes<W>::Floats lanes[G];
      for (int g = 0; g < G; ++g) {
        lanes[g] = load<W>(panel + d * stride + key + g * W);
      }
      for (int r = 0; r < R; ++r) {
        const float factor = rows[r * row_stride + d];
        for (int g = 0; g < G; ++g) {
          sums[r][g] += factor * lanes[g];
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int g = 0; g < G; ++g) {
        store(result + r * stride + key + g * W, sums[r][g]);
      }
    }
  }
}

// result[r] = sum over keys of weights[r, key] * rows[key], for one run of W dims.
template <int W, int R>
HYBRID_RL_INLINE void weigh_rows(
    const float* weights, int64_t stride, const float* rows, int64_t dim, int64_t column, int64_t first, int64_t last, typename Lanes<W>::Floats (&sums)[R]) {
  for (int64_t key = first; key < last; ++key) {
    const auto lanes = load<W>(rows + key * dim + column);
    for (int r = 0; r < R; ++r) {
      sums[r] += weights[r * stride + key] * lanes;
    }
  }
}

// rows[key] += sum over r of weights[r, key] * tile[r].
template <int W, int R>
HYBRID_RL_INLINE void scatter_rows(
    const float* weights, int64_t stride, const float* tile, int64_t dim, int64_t first, int64_t last, float* rows) {
  for (int64_t column = 0; column < dim; column += W) {
    typename Lanes<W>::Floats lanes[R];
    for (int r = 0; r < R; ++r) {
      lanes[r] = load<W>(tile + r * dim + column);
    }
    for (int64_t key = first; key < last; ++key) {
      auto sum = load<W>(rows + key * dim + column);
      for (int r = 0; r < R; ++r) {
        sum += weights[r * stride + key] * lanes[r];
      }
      store(rows + key * dim + column, sum);
    }
  }
}

// Which keys a row sees: [first, last).
struct Range {
  int64_t first, last;
};

HYBRID_RL_INLINE Range visible(const Problem& p, int64_t position) {
  return {p.window > 0 ? std::max<int64_t>(0, position - p.window + 1) : 0, position + 1};
}

HYBRID_RL_INLINE void cap(const Problem& p, float* scores, int64_t first, int64_t last) {
  if (p.softcap > 0.0f) {
    for (int64_t key = first; key < last; ++key) {
      scores[key] = p.softcap * std::tanh(scores[key] / p.softcap);
    }
  }
}

// What a row does not see of [begin, end) gets `value`.
HYBRID_RL_INLINE void hide(float* scores, int64_t begin, int64_t end, Range range, float value) {
  std::fill(scores + begin, scores + range.first, value);
  std::fill(scores + range.last, scores + end, value);
}

// Scores to exp(score - shift), in place; returns their sum.
template <int W>
HYBRID_RL_INLINE float weigh(float* scores, int64_t begin, int64_t end, float shift) {
  typename Lanes<W>::Floats total{};
  for (int64_t key = begin; key < end; key += W) {
    const auto weights = exp_of_nonpositive(load<W>(scores + key) - shift);
    store(scores + key, weights);
    total += weights;
  }
  return sum_of(total);
}

// Rows first_row .. first_row + R of a segment that starts at token `start` and position `before`.
template <int W, int R>
HYBRID_RL_INLINE void attend_rows(const Problem& p, Scratch& s, int64_t kv_head, int64_t start, int64_t before, int64_t first_row) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t begin = visible(p, before + first_row / group).first / kLanes * kLanes;
  const int64_t last = before + (first_row + R - 1) / group + 1;
  const int64_t end = begin + (last - begin + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  int64_t place[R]; // of the row in [T, H]
  int64_t position[R];
  float query[R * kMaxDim], grad[R * kMaxDim];
  for (int r = 0; r < R; ++r) {
    const int64_t token = (first_row + r) / group;
    place[r] = (start + token) * p.num_heads + kv_head * group + (first_row + r) % group;
    position[r] = before + token;
    for (int64_t d = 0; d < s.key_dim; ++d) {
      query[r * s.key_dim + d] = d < p.key_dim ? p.query[place[r] * p.key_dim + d] * p.scale : 0.0f;
    }
  }
  multiply_panel<W, R>(query, s.key_dim, s.key_panel, p.key_dim, s.stride, begin, last, s.scores);
  if (p.grad == nullptr) {
    float inverse[R];
    for (int r = 0; r < R; ++r) {
      float* scores = s.scores + r * s.stride;
      const Range range = visible(p, position[r]);
      cap(p, scores, range.first, range.last);
      hide(scores, begin, end, range, kHidden);
      const float top = largest_of<W>(scores, begin, end);
      const float total = weigh<W>(scores, begin, end, top);
      inverse[r] = 1.0f / total;
      p.lse[place[r]] = top + std::log(total);
    }
    for (int64_t column = 0; column < s.value_dim; column += W) {
      typename Lanes<W>::Floats sums[R] = {};
      weigh_rows<W, R>(s.scores, s.stride, s.value_rows, s.value_dim, column, begin, last, sums);
      for (int r = 0; r < R; ++r) {
        float lanes[W];
        store(lanes, sums[r] * inverse[r]);
        std::copy_n(lanes, std::clamp<int64_t>(p.value_dim - column, 0, W), p.out + place[r] * p.value_dim + column);
      }
    }
    return;
  }
  float delta[R];
  for (int r = 0; r < R; ++r) {
    delta[r] = 0.0f;
    for (int64_t d = 0; d < s.value_dim; ++d) {
      grad[r * s.value_dim + d] = d < p.value_dim ? p.grad[place[r] * p.value_dim + d] : 0.0f;
      delta[r] += d < p.value_dim ? grad[r * s.value_dim + d] * p.out[place[r] * p.value_dim + d] : 0.0f;
    }
  }
  multiply_panel<W, R>(grad, s.value_dim, s.value_panel, p.value_dim, s.stride, begin, last, s.slopes);
  for (int r = 0; r < R; ++r) {
    float* weights = s.scores + r * s.stride;
    float* slopes = s.slopes + r * s.stride;
    const Range range = visible(p, position[r]);
    cap(p, weights, range.first, range.last);
    if (p.softcap > 0.0f) {
      for (int64_t key = range.first; key < range.last; ++key) {
        const float share = weights[key] / p.softcap;
        slopes[key] = (slopes[key] - delta[r]) * (1.0f - share * share);
      }
    } else {
      for (int64_t key = begin; key < end; ++key) {
        slopes[key] -= delta[r];
      }
    }
    hide(weights, begin, end, range, kHidden);
    weigh<W>(weights, begin, end, p.lse[place[r]]);
    // Outside of what the row sees the weight is zero, but the slope may be anything, infinite too.
    hide(slopes, begin, end, range, 0.0f);
    for (int64_t key = begin; key < end; ++key) {
      slopes[key] *= weights[key];
    }
  }
  scatter_rows<W, R>(s.scores, s.stride, grad, s.value_dim, begin, last, s.grad_values);
  scatter_rows<W, R>(s.slopes, s.stride, query, s.key_dim, begin, last, s.grad_keys); // query holds the scale already
  for (int64_t column = 0; column < s.key_dim; column += W) {
    typename Lanes<W>::Floats sums[R] = {};
    weigh_rows<W, R>(s.slopes, s.stride, s.key_rows, s.key_dim, column, begin, last, sums);
    for (int r = 0; r < R; ++r) {
      float lanes[W];
      store(lanes, sums[r] * p.scale);
      std::copy_n(lanes, std::clamp<int64_t>(p.key_dim - column, 0, W), p.grad_query + place[r] * p.key_dim + column);
    }
  }
}

// Keys and values of a segment into rows and panels from index `before` on; their gradients start at zero.
HYBRID_RL_INLINE void gather(const Problem& p, Scratch& s, int64_t kv_head, int64_t start, int64_t count, int64_t before) {
  for (int64_t i = 0; i < count; ++i) {
    const float* key = p.key + ((start + i) * p.num_kv_heads + kv_head) * p.key_dim;
    const float* value = p.value + ((start + i) * p.num_kv_heads + kv_head) * p.value_dim;
    for (int64_t d = 0; d < p.key_dim; ++d) {
      s.key_panel[d * s.stride + before + i] = key[d];
    }
    std::copy(value, value + p.value_dim, s.value_rows + (before + i) * s.value_dim);
    if (p.grad != nullptr) {
      for (int64_t d = 0; d < p.value_dim; ++d) {
        s.value_panel[d * s.stride + before + i] = value[d];
      }
      std::copy(key, key + p.key_dim, s.key_rows + (before + i) * s.key_dim);
      std::fill_n(s.grad_keys + (before + i) * s.key_dim, s.key_dim, 0.0f);
      std::fill_n(s.grad_values + (before + i) * s.value_dim, s.value_dim, 0.0f);
    }
  }
}

// Gradients of `count` keys and values from index `before` on into rows [count, H_kv, D] and [count, H_kv, D_v].
HYBRID_RL_INLINE void scatter(
    const Problem& p, const Scratch& s, int64_t kv_head, int64_t count, int64_t before, float* grad_key, float* grad_value) {
  for (int64_t i = 0; i < count && p.grad != nullptr; ++i) {
    const float* key = s.grad_keys + (before + i) * s.key_dim;
    const float* value = s.grad_values + (before + i) * s.value_dim;
    std::copy(key, key + p.key_dim, grad_key + (i * p.num_kv_heads + kv_head) * p.key_dim);
    std::copy(value, value + p.value_dim, grad_value + (i * p.num_kv_heads + kv_head) * p.value_dim);
  }
}

HYBRID_RL_INLINE void scatter_segment(
    const Problem& p, const Scratch& s, int64_t kv_head, int64_t start, int64_t count, int64_t before) {
  const int64_t first = start * p.num_kv_heads;
  scatter(p, s, kv_head, count, before, p.grad_key + first * p.key_dim, p.grad_value + first * p.value_dim);
}

template <int W>
HYBRID_RL_INLINE void attend_segment(const Problem& p, Scratch& s, int64_t kv_head, int64_t start, int64_t count, int64_t before) {
  const int64_t num_rows = count * (p.num_heads / p.num_kv_heads);
  int64_t row = 0;
  for (; row + 8 <= num_rows; row += 8) {
    attend_rows<W, 8>(p, s, kv_head, start, before, row);
  }
  for (; row + 4 <= num_rows; row += 4) {
    attend_rows<W, 4>(p, s, kv_head, start, before, row);
  }
  for (; row + 2 <= num_rows; row += 2) {
    attend_rows<W, 2>(p, s, kv_head, start, before, row);
  }
  for (; row < num_rows; ++row) {
    attend_rows<W, 1>(p, s, kv_head, start, before, row);
  }
}

} // namespace hybrid_rl::packed
