// Causal attention of ragged queries against keys and values that lie in blocks: a decode step, a chunk of a prompt, or
// both in one call. CPU; float32 and bfloat16, computed in float32. The cache holds the same dtype, or integers of 8 bits
// with a float32 scale per token and head, of keys and of values: x = integer * scale, which are multiplied with scores
// and with weights.
//
// A block of keys is [head, dim, token], so that sixteen tokens are scored at once without horizontal sums; a block of
// values is [head, token, dim]. The query heads that share a key head, and neighbouring tokens, form the rows of a tile:
// a block is loaded once for all of them.

#include "int8_rows.h"
#include "lanes.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using hybrid_rl::BFloat16;
using hybrid_rl::kLanes;
using hybrid_rl::Lanes;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTileRows = 8;
// Multiplications below which threads cost more than they bring.
constexpr double kSerialWork = 1 << 19;

// C: what the cache holds.
template <typename T, typename C = T>
struct Problem {
  static constexpr bool kIsRounded = std::is_same_v<C, int8_t>;

  const T* query; // [T, H, D]
  C* keys; // [N, H_kv, D, block]
  C* values; // [N, H_kv, block, D_v rounded up to lanes]
  float* key_scales; // [N, H_kv, block], if it is rounded
  float* value_scales;
  T* out; // [T, H, D_v]
  const int32_t* block_table; // [B, M]
  const int64_t* query_start; // [B + 1]
  const int64_t* context_length; // [B]
  int64_t num_heads, num_kv_heads, key_dim, value_dim, padded_value_dim, block_size, table_width;
  float scale, softcap; // softcap 0: none
  int64_t window; // 0: none

  C* key_block(int64_t block, int64_t head) const {
    return keys + (block * num_kv_heads + head) * key_dim * block_size;
  }
  C* value_block(int64_t block, int64_t head) const {
    return values + (block * num_kv_heads + head) * block_size * padded_value_dim;
  }
  int64_t scale_place(int64_t block, int64_t head) const {
    return (block * num_kv_heads + head) * block_size;
  }
};

struct Task {
  int64_t sequence, kv_head, first_row; // rows count (token, query head of the group), the head running fastest
};

// W: floats of a register. Eight registers of sums hide the latency of an addition and leave AVX2 enough for the rest;
// AVX-512 has twice as many.
template <int W, int R>
constexpr int kRuns = W == 16 ? (R == 8 ? 2 : 4) : 8 / R;
template <int W, int R>
constexpr int kColumns = W == 16 ? 2 : 8 / R;

// Scores of R rows against G runs of W tokens, each at its own address.
template <typename C, int W, int R, int G>
HYBRID_RL_INLINE void score_lanes(
    const float* query, // [R, D], scaled
    int64_t dim,
    const C* const* keys,
    const float* const* key_scales, // of each run, if keys are integers
    int64_t token_stride, // from one dim to the next
    float* scores, // [R, row_stride]
    int64_t row_stride) {
  typename Lanes<W>::Floats sums[R][G] = {};
  for (int64_t d = 0; d < dim; ++d) {
    typename Lanes<W>::Floats lanes[G];
    for (int g = 0; g < G; ++g) {
      lanes[g] = hybrid_rl::load<W>(keys[g] + d * token_stride);
    }
    for (int r = 0; r < R; ++r) {
      for (int g = 0; g < G; ++g) {
        sums[r][g] += query[r * dim + d] * lanes[g];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      if constexpr (std::is_same_v<C, int8_t>) {
        sums[r][g] *= hybrid_rl::load<W>(key_scales[g]);
      }
      hybrid_rl::store(scores + r * row_stride + g * W, sums[r][g]);
    }
  }
}

// In place: scores of [first, last) to weights, 0 outside; returns their sum. first and last count from the row's start.
template <int W>
HYBRID_RL_INLINE float softmax_row(float* scores, int64_t length, int64_t first, int64_t last) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + first, kHidden);
  std::fill(scores + last, scores + length, kHidden);
  const float top = hybrid_rl::largest_of<W>(scores, 0, length);
  typename Lanes<W>::Floats total{};
  for (int64_t i = 0; i < length; i += W) {
    const auto weights = hybrid_rl::exp_of_nonpositive(hybrid_rl::load<W>(scores + i) - top);
    hybrid_rl::store(scores + i, weights);
    total += weights;
  }
  return hybrid_rl::sum_of(total);
}

// sums[r][c] = sum over tokens of weight * value, for C runs of W dims.
template <typename P, int W, int R, int C>
HYBRID_RL_INLINE void weigh_values(
    const P& p,
    const int32_t* table,
    int64_t kv_head,
    int64_t first_block,
    int64_t last_token,
    int64_t first_dim,
    const float* weights, // [R, row_stride], from the first token of first_block on
    int64_t row_stride,
    typename Lanes<W>::Floats (&sums)[R][C]) {
  for (int64_t block = first_block; block * p.block_size < last_token; ++block) {
    const auto* values = p.value_block(table[block], kv_head) + first_dim;
    // Tokens behind the last one were never written and may hold anything, also NaN.
    const int64_t num_tokens = std::min(p.block_size, last_token - block * p.block_size);
    const float* weight = weights + (block - first_block) * p.block_size;
    for (int64_t token = 0; token < num_tokens; ++token) {
      typename Lanes<W>::Floats lanes[C];
      for (int c = 0; c < C; ++c) {
        lanes[c] = hybrid_rl::load<W>(values + token * p.padded_value_dim + c * W);
      }
      for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
          sums[r][c] += weight[r * row_stride + token] * lanes[c];
        }
      }
    }
  }
}

template <typename P, typename T, int W, int R, int C>
HYBRID_RL_INLINE void write_values(
    const P& p,
    const int32_t* table,
    int64_t kv_head,
    int64_t first_block,
    int64_t last_token,
    int64_t first_dim,
    const float* weights,
    int64_t row_stride,
    const float* inverse,
    T* const* out) {
  typename Lanes<W>::Floats sums[R][C] = {};
  weigh_values<P, W, R, C>(p, table, kv_head, first_block, last_token, first_dim, weights, row_stride, sums);
  const int64_t num_dims = std::min<int64_t>(C * W, p.value_dim - first_dim);
  for (int r = 0; r < R; ++r) {
    float row[C * W];
    for (int c = 0; c < C; ++c) {
      hybrid_rl::store(row + c * W, sums[r][c] * inverse[r]);
    }
    for (int64_t i = 0; i < num_dims; ++i) {
      hybrid_rl::from_float(row[i], out[r][first_dim + i]);
    }
  }
}

// R rows of one sequence and key head.
template <typename T, typename K, int W, int R>
HYBRID_RL_INLINE void attend_rows(const Problem<T, K>& p, int64_t sequence, int64_t kv_head, int64_t first_row, std::vector<float>& scratch) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t num_queries = p.query_start[sequence + 1] - p.query_start[sequence];
  const int64_t before = p.context_length[sequence] - num_queries;
  const int32_t* table = p.block_table + sequence * p.table_width;
  const int64_t first_position = before + first_row / group;
  const int64_t last_position = before + (first_row + R - 1) / group;
  const int64_t first_visible = p.window > 0 ? std::max<int64_t>(0, first_position - p.window + 1) : 0;
  const int64_t first_block = first_visible / p.block_size;
  const int64_t origin = first_block * p.block_size;
  const int64_t last_token = last_position + 1;
  constexpr int G = kRuns<W, R>;
  const int64_t num_runs = (last_token - origin + W - 1) / W;
  const int64_t row_stride = (num_runs + G - 1) / G * G * W;
  scratch.resize(R * (row_stride + p.key_dim));
  float* scores = scratch.data();
  float* query = scores + R * row_stride;
  T* out[R];
  for (int r = 0; r < R; ++r) {
    const int64_t token = p.query_start[sequence] + (first_row + r) / group;
    const int64_t head = kv_head * group + (first_row + r) % group;
    const T* source = p.query + (token * p.num_heads + head) * p.key_dim;
    for (int64_t d = 0; d < p.key_dim; ++d) {
      query[r * p.key_dim + d] = hybrid_rl::to_float(source[d]) * p.scale;
    }
    out[r] = p.out + (token * p.num_heads + head) * p.value_dim;
  }
  const int64_t runs_per_block = p.block_size / W;
  const K* keys[G];
  const float* key_scales[G];
  const auto locate = [&](int64_t run, int count) {
    for (int g = 0; g < count; ++g) {
      const int64_t own = std::min(run + g, num_runs - 1); // a surplus run scores the last one again, into the padding
      const int32_t block = table[first_block + own / runs_per_block];
      const int64_t offset = own % runs_per_block * W;
      keys[g] = p.key_block(block, kv_head) + offset;
      if constexpr (p.kIsRounded) {
        key_scales[g] = p.key_scales + p.scale_place(block, kv_head) + offset;
      }
    }
  };
  int64_t run = 0;
  for (; num_runs - run > G / 2; run += G) {
    locate(run, G);
    score_lanes<K, W, R, G>(query, p.key_dim, keys, key_scales, p.block_size, scores + run * W, row_stride);
  }
  if constexpr (G > 1) {
    if (run < num_runs) {
      locate(run, G / 2);
      score_lanes<K, W, R, G / 2>(query, p.key_dim, keys, key_scales, p.block_size, scores + run * W, row_stride);
    }
  }
  float inverse[R];
  for (int r = 0; r < R; ++r) {
    const int64_t position = before + (first_row + r) / group;
    const int64_t visible = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1) : 0;
    float* row = scores + r * row_stride;
    if (p.softcap > 0.0f) {
      for (int64_t i = visible - origin; i <= position - origin; ++i) {
        row[i] = p.softcap * std::tanh(row[i] / p.softcap);
      }
    }
    inverse[r] = 1.0f / softmax_row<W>(row, num_runs * W, visible - origin, position + 1 - origin);
    if constexpr (p.kIsRounded) {
      for (int64_t block = first_block; block * p.block_size < last_token; ++block) {
        const float* value_scales = p.value_scales + p.scale_place(table[block], kv_head);
        const int64_t num_tokens = std::min(p.block_size, last_token - block * p.block_size);
        float* weights = row + block * p.block_size - origin;
        for (int64_t token = 0; token < num_tokens; ++token) {
          weights[token] *= value_scales[token];
        }
      }
    }
  }
  constexpr int C = kColumns<W, R>;
  int64_t dim = 0;
  for (; dim + C * W <= p.padded_value_dim; dim += C * W) {
    write_values<Problem<T, K>, T, W, R, C>(p, table, kv_head, first_block, last_token, dim, scores, row_stride, inverse, out);
  }
  for (; dim < p.padded_value_dim; dim += W) {
    write_values<Problem<T, K>, T, W, R, 1>(p, table, kv_head, first_block, last_token, dim, scores, row_stride, inverse, out);
  }
}

template <typename T, typename K, int W>
HYBRID_RL_INLINE void attend_task(const Problem<T, K>& p, const Task& task, std::vector<float>& scratch) {
  const int64_t num_queries = p.query_start[task.sequence + 1] - p.query_start[task.sequence];
  const int64_t num_rows = num_queries * (p.num_heads / p.num_kv_heads);
  const int64_t end = std::min(task.first_row + kTileRows, num_rows);
  int64_t row = task.first_row;
  for (; row + 8 <= end; row += 8) {
    attend_rows<T, K, W, 8>(p, task.sequence, task.kv_head, row, scratch);
  }
  for (; row + 4 <= end; row += 4) {
    attend_rows<T, K, W, 4>(p, task.sequence, task.kv_head, row, scratch);
  }
  for (; row + 2 <= end; row += 2) {
    attend_rows<T, K, W, 2>(p, task.sequence, task.kv_head, row, scratch);
  }
  for (; row < end; ++row) {
    attend_rows<T, K, W, 1>(p, task.sequence, task.kv_head, row, scratch);
  }
}

template <typename T, typename K, int W>
HYBRID_RL_INLINE void attend_all(const Problem<T, K>& p, const Task* begin, const Task* end, std::vector<float>& scratch) {
  for (const Task* task = begin; task != end; ++task) {
    attend_task<T, K, W>(p, *task, scratch);
  }
}

thread_local std::vector<float> scratch_of_thread;

HYBRID_RL_PER_WIDTH(
    void attend_tasks(const Problem<float>& p, const Task* begin, const Task* end),
    (attend_all<float, float, kWidth>(p, begin, end, scratch_of_thread));)

HYBRID_RL_PER_WIDTH(
    void attend_tasks(const Problem<BFloat16>& p, const Task* begin, const Task* end),
    (attend_all<BFloat16, BFloat16, kWidth>(p, begin, end, scratch_of_thread));)

HYBRID_RL_PER_WIDTH(
    void attend_tasks(const Problem<float, int8_t>& p, const Task* begin, const Task* end),
    (attend_all<float, int8_t, kWidth>(p, begin, end, scratch_of_thread));)

HYBRID_RL_PER_WIDTH(
    void attend_tasks(const Problem<BFloat16, int8_t>& p, const Task* begin, const Task* end),
    (attend_all<BFloat16, int8_t, kWidth>(p, begin, end, scratch_of_thread));)

HYBRID_RL_TARGETS float round_numbers(const float* numbers, int64_t size, int8_t* out) {
  return hybrid_rl::round_row(numbers, size, out);
}

// Returns a head's numbers as the cache holds them; their scale is written to its place.
template <typename T, typename C>
const C* prepare(const T* numbers, int64_t size, std::vector<float>& floats, std::vector<int8_t>& integers, float* scales, int64_t place) {
  if constexpr (std::is_same_v<T, C>) {
    return numbers;
  } else {
    std::transform(numbers, numbers + size, floats.begin(), [](T number) { return hybrid_rl::to_float(number); });
    scales[place] = round_numbers(floats.data(), size, integers.data());
    return integers.data();
  }
}

// The new tokens' keys and values into their places, before anybody reads them: sequences may share blocks.
template <typename T, typename C>
void write_new_tokens(const Problem<T, C>& p, const T* key, const T* value, int64_t num_sequences) {
  std::vector<float> floats(std::max(p.key_dim, p.value_dim));
  std::vector<int8_t> integers(floats.size());
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t begin = p.query_start[sequence];
    const int64_t end = p.query_start[sequence + 1];
    for (int64_t token = begin; token < end; ++token) {
      const int64_t position = p.context_length[sequence] - end + token;
      const int64_t block = p.block_table[sequence * p.table_width + position / p.block_size];
      const int64_t offset = position % p.block_size;
      for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        const int64_t row = token * p.num_kv_heads + head;
        const int64_t place = p.scale_place(block, head) + offset;
        const C* new_key = prepare<T, C>(key + row * p.key_dim, p.key_dim, floats, integers, p.key_scales, place);
        C* keys = p.key_block(block, head) + offset;
        for (int64_t d = 0; d < p.key_dim; ++d) {
          keys[d * p.block_size] = new_key[d];
        }
        const C* new_value =
            prepare<T, C>(value + row * p.value_dim, p.value_dim, floats, integers, p.value_scales, place);
        std::copy(new_value, new_value + p.value_dim, p.value_block(block, head) + offset * p.padded_value_dim);
      }
    }
  }
}

template <typename T, typename C>
void run(const Problem<T, C>& p, const T* key, const T* value, int64_t num_sequences) {
  write_new_tokens(p, key, value, num_sequences);
  std::vector<Task> tasks;
  double work = 0.0;
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t num_queries = p.query_start[sequence + 1] - p.query_start[sequence];
    const int64_t num_rows = num_queries * (p.num_heads / p.num_kv_heads);
    work += static_cast<double>(num_queries * p.num_heads) * p.context_length[sequence] * (p.key_dim + p.value_dim);
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      for (int64_t row = 0; row < num_rows; row += kTileRows) {
        tasks.push_back({sequence, head, row});
      }
    }
  }
  const int64_t num_tasks = static_cast<int64_t>(tasks.size());
  const int64_t grain = work < kSerialWork ? num_tasks : std::max<int64_t>(1, static_cast<int64_t>(num_tasks * kSerialWork / work / 4));
  torch::stable::parallel_for(0, num_tasks, grain, [&](int64_t begin, int64_t end) {
    attend_tasks(p, tasks.data() + begin, tasks.data() + end);
  });
}

template <typename T, typename C>
Problem<T, C> describe(
    const Tensor& query,
    const Tensor& keys,
    const Tensor& values,
    const Tensor& out,
    const Tensor& block_table,
    const Tensor& query_start,
    const Tensor& context_length) {
  Problem<T, C> p{};
  p.query = static_cast<const T*>(query.const_data_ptr());
  p.keys = static_cast<C*>(keys.mutable_data_ptr());
  p.values = static_cast<C*>(values.mutable_data_ptr());
  p.out = static_cast<T*>(out.mutable_data_ptr());
  p.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  p.query_start = static_cast<const int64_t*>(query_start.const_data_ptr());
  p.context_length = static_cast<const int64_t*>(context_length.const_data_ptr());
  p.num_heads = query.size(1);
  p.num_kv_heads = keys.size(1);
  p.key_dim = keys.size(2);
  p.block_size = keys.size(3);
  p.value_dim = out.size(2);
  p.padded_value_dim = values.size(3);
  p.table_width = block_table.size(1);
  return p;
}

// Every index that the kernel follows is checked once: a wrong one would read or write memory that is not the cache's.
void check_indices(const Tensor& block_table, const Tensor& query_start, const Tensor& context_length, const Tensor& query, const Tensor& keys) {
  const int32_t* table = static_cast<const int32_t*>(block_table.const_data_ptr());
  const int64_t* start = static_cast<const int64_t*>(query_start.const_data_ptr());
  const int64_t* length = static_cast<const int64_t*>(context_length.const_data_ptr());
  const int64_t num_sequences = context_length.size(0);
  const int64_t block_size = keys.size(3);
  STD_TORCH_CHECK(
      start[0] == 0 && start[num_sequences] == query.size(0),
      "hybrid_rl::paged_attention: query_start must run from 0 to the number of queries");
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int64_t num_queries = start[i + 1] - start[i];
    STD_TORCH_CHECK(
        num_queries >= 0 && num_queries <= length[i],
        "hybrid_rl::paged_attention: sequence ", i, " has ", num_queries, " queries and a context of ", length[i]);
    const int64_t num_blocks = (length[i] + block_size - 1) / block_size;
    STD_TORCH_CHECK(
        num_blocks <= block_table.size(1),
        "hybrid_rl::paged_attention: sequence ", i, " needs ", num_blocks, " blocks, its table has ", block_table.size(1));
    for (int64_t j = 0; j < num_blocks; ++j) {
      const int32_t block = table[i * block_table.size(1) + j];
      STD_TORCH_CHECK(
          block >= 0 && block < keys.size(0),
          "hybrid_rl::paged_attention: sequence ", i, " names block ", block, " of ", keys.size(0));
    }
  }
}

void check_shapes(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& keys, const Tensor& values) {
  STD_TORCH_CHECK(
      query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && keys.dim() == 4 && values.dim() == 4,
      "hybrid_rl::paged_attention: query, key and value must be [T, heads, dim], the cache four-dimensional");
  STD_TORCH_CHECK(
      key.size(0) == query.size(0) && value.size(0) == query.size(0) && key.size(1) == keys.size(1) &&
          value.size(1) == keys.size(1) && values.size(1) == keys.size(1) && values.size(0) == keys.size(0) &&
          query.size(2) == keys.size(2) && key.size(2) == keys.size(2) && query.size(1) % keys.size(1) == 0,
      "hybrid_rl::paged_attention: query, key, value and cache differ in tokens, heads or dims");
  STD_TORCH_CHECK(
      keys.size(3) % kLanes == 0 && values.size(2) == keys.size(3) && values.size(3) % kLanes == 0 &&
          values.size(3) >= value.size(2),
      "hybrid_rl::paged_attention: the block size and the padded value dim must be multiples of ", kLanes);
}

// key_scales, value_scales: null for a cache of the dtype of queries.
Tensor attend(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& keys,
    const Tensor& values,
    const Tensor* key_scales,
    const Tensor* value_scales,
    const Tensor& block_table,
    const Tensor& query_start,
    const Tensor& context_length,
    double scale,
    int64_t window,
    double softcap) {
  check_shapes(query, key, value, keys, values);
  const ScalarType type = query.scalar_type();
  const ScalarType cached = key_scales == nullptr ? type : ScalarType::Char;
  STD_TORCH_CHECK(
      (type == ScalarType::Float || type == ScalarType::BFloat16) && key.scalar_type() == type && value.scalar_type() == type &&
          keys.scalar_type() == cached && values.scalar_type() == cached,
      "hybrid_rl::paged_attention: query, key, value and cache must all be float32 or all bfloat16; the cache may be int8 "
      "with scales");
  if (key_scales != nullptr) {
    for (const Tensor* scales : {key_scales, value_scales}) {
      STD_TORCH_CHECK(
          scales->scalar_type() == ScalarType::Float && scales->is_contiguous() && scales->dim() == 3 &&
              scales->size(0) == keys.size(0) && scales->size(1) == keys.size(1) && scales->size(2) == keys.size(3),
          "hybrid_rl::paged_attention: scales must be contiguous float32 [N, key heads, block]");
    }
  }
  STD_TORCH_CHECK(
      block_table.dim() == 2 && query_start.dim() == 1 && context_length.dim() == 1 &&
          block_table.size(0) == context_length.size(0) && query_start.size(0) == context_length.size(0) + 1 &&
          block_table.scalar_type() == ScalarType::Int && query_start.scalar_type() == ScalarType::Long &&
          context_length.scalar_type() == ScalarType::Long,
      "hybrid_rl::paged_attention: block_table must be int32 [B, M], query_start int64 [B + 1], context_length int64 [B]");
  for (const Tensor* tensor : {&query, &key, &value, &keys, &values, &block_table, &query_start, &context_length}) {
    STD_TORCH_CHECK(tensor->is_contiguous(), "hybrid_rl::paged_attention: all tensors must be contiguous");
  }
  check_indices(block_table, query_start, context_length, query, keys);

  const int64_t sizes[3] = {query.size(0), query.size(1), value.size(2)};
  Tensor out = torch::stable::new_empty(query, {sizes, 3}, type);
  const int64_t num_sequences = context_length.size(0);
  const auto start = [&](auto number, auto held) {
    using T = decltype(number);
    using C = decltype(held);
    Problem<T, C> p = describe<T, C>(query, keys, values, out, block_table, query_start, context_length);
    if (key_scales != nullptr) {
      p.key_scales = static_cast<float*>(key_scales->mutable_data_ptr());
      p.value_scales = static_cast<float*>(value_scales->mutable_data_ptr());
    }
    p.scale = static_cast<float>(scale);
    p.window = window;
    p.softcap = static_cast<float>(softcap);
    run<T, C>(p, static_cast<const T*>(key.const_data_ptr()), static_cast<const T*>(value.const_data_ptr()), num_sequences);
  };
  const auto start_with = [&](auto number) {
    if (key_scales == nullptr) {
      start(number, number);
    } else {
      start(number, int8_t{});
    }
  };
  if (type == ScalarType::Float) {
    start_with(float{});
  } else {
    start_with(BFloat16{});
  }
  return out;
}

Tensor paged_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& keys,
    const Tensor& values,
    const Tensor& block_table,
    const Tensor& query_start,
    const Tensor& context_length,
    double scale,
    int64_t window,
    double softcap) {
  return attend(
      query, key, value, keys, values, nullptr, nullptr, block_table, query_start, context_length, scale, window, softcap);
}

Tensor paged_attention_int8(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& keys,
    const Tensor& values,
    const Tensor& key_scales,
    const Tensor& value_scales,
    const Tensor& block_table,
    const Tensor& query_start,
    const Tensor& context_length,
    double scale,
    int64_t window,
    double softcap) {
  return attend(
      query, key, value, keys, values, &key_scales, &value_scales, block_table, query_start, context_length, scale, window,
      softcap);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor block_table, "
      "Tensor query_start, Tensor context_length, float scale, int window, float softcap) -> Tensor");
  library.def(
      "paged_attention_int8(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!) key_scales, Tensor(d!) value_scales, Tensor block_table, Tensor query_start, Tensor context_length, "
      "float scale, int window, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("paged_attention_int8", TORCH_BOX(&paged_attention_int8));
}
