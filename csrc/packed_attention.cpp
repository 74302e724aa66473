// The operators of packed_attention_kernel.h: attention within a packed row of a training step, and its gradients.

#include "packed_attention_kernel.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace {

using namespace hybrid_rl::packed;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Multiplications below which threads cost more than they bring.
constexpr double kSerialWork = 1 << 19;

template <int W>
HYBRID_RL_INLINE void attend_all(const Problem& p, int64_t first_task, int64_t last_task, Scratch& scratch) {
  for (int64_t task = first_task; task < last_task; ++task) {
    // Heads run slowest: families are sorted by length, and the threads should get as many long ones each.
    const int64_t kv_head = task / p.num_families;
    const int64_t number = task % p.num_families;
    const int64_t* family = p.families + number;
    const int64_t root = family[0];
    const int64_t before = number > 0 ? p.num_prefix : 0;
    const int64_t whole = before + p.tokens[root];
    int64_t longest = 0;
    for (int64_t child = root + 1; child < family[1]; ++child) {
      longest = std::max(longest, p.tokens[child]);
    }
    scratch.prepare(whole + longest, p);
    gather(p, scratch, kv_head, 0, before, 0);
    gather(p, scratch, kv_head, p.starts[root], p.tokens[root], before);
    attend_segment<W>(p, scratch, kv_head, p.starts[root], p.tokens[root], before);
    for (int64_t child = root + 1; child < family[1]; ++child) {
      gather(p, scratch, kv_head, p.starts[child], p.tokens[child], whole);
      attend_segment<W>(p, scratch, kv_head, p.starts[child], p.tokens[child], whole);
      scatter_segment(p, scratch, kv_head, p.starts[child], p.tokens[child], whole);
    }
    scatter_segment(p, scratch, kv_head, p.starts[root], p.tokens[root], before);
    if (before > 0) {
      const int64_t first = (number - 1) * before * p.num_kv_heads;
      float* grad_key = p.prefix_grad_key + first * p.key_dim;
      scatter(p, scratch, kv_head, before, 0, grad_key, p.prefix_grad_value + first * p.value_dim);
    }
  }
}

thread_local Scratch scratch_of_thread;

HYBRID_RL_PER_WIDTH(
    void attend_families(const Problem& p, int64_t first_task, int64_t last_task),
    attend_all<kWidth>(p, first_task, last_task, scratch_of_thread);)

void check_tensor(const Tensor& tensor, const char* name, int64_t num_tokens, int64_t num_heads, int64_t dim) {
  STD_TORCH_CHECK(
      tensor.dim() == 3 && tensor.size(0) == num_tokens && tensor.size(1) == num_heads && tensor.size(2) == dim &&
          tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(),
      "hybrid_rl::packed_attention: ", name, " must be contiguous float32 [", num_tokens, ", ", num_heads, ", ", dim, "]");
}

// Segments cover the row without overlap, and families the segments; a wrong index would read foreign memory.
void check_segments(
    const Tensor& starts, const Tensor& tokens, const Tensor& families, int64_t num_prefix, int64_t num_tokens) {
  for (const Tensor* tensor : {&starts, &tokens, &families}) {
    STD_TORCH_CHECK(
        tensor->dim() == 1 && tensor->scalar_type() == ScalarType::Long && tensor->is_contiguous(),
        "hybrid_rl::packed_attention: starts, tokens and families must be contiguous int64, one-dimensional");
  }
  const int64_t* start = static_cast<const int64_t*>(starts.const_data_ptr());
  const int64_t* count = static_cast<const int64_t*>(tokens.const_data_ptr());
  const int64_t* family = static_cast<const int64_t*>(families.const_data_ptr());
  const int64_t num_segments = starts.size(0);
  const int64_t num_families = families.size(0) - 1;
  STD_TORCH_CHECK(
      tokens.size(0) == num_segments && num_families >= 0 && family[0] == 0 && family[num_families] == num_segments,
      "hybrid_rl::packed_attention: families must run from 0 to the number of segments, ", num_segments);
  for (int64_t i = 0; i < num_families; ++i) {
    STD_TORCH_CHECK(family[i] < family[i + 1], "hybrid_rl::packed_attention: family ", i, " has no root");
  }
  std::vector<bool> taken(static_cast<size_t>(num_tokens), false);
  int64_t total = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    STD_TORCH_CHECK(
        start[i] >= 0 && count[i] >= 1 && start[i] <= num_tokens - count[i],
        "hybrid_rl::packed_attention: segment ", i, " of ", count[i], " tokens at ", start[i], " lies outside of the row");
    for (int64_t token = start[i]; token < start[i] + count[i]; ++token) {
      STD_TORCH_CHECK(!taken[token], "hybrid_rl::packed_attention: token ", token, " is in two segments");
      taken[token] = true;
    }
    total += count[i];
  }
  STD_TORCH_CHECK(total == num_tokens, "hybrid_rl::packed_attention: ", num_tokens - total, " tokens are in no segment");
  const bool is_first = num_families > 0 && family[1] == 1 && start[0] == 0 && count[0] == num_prefix;
  STD_TORCH_CHECK(
      num_prefix == 0 || is_first,
      "hybrid_rl::packed_attention: a prefix of ", num_prefix, " tokens must be the first family, alone, at the front of the row");
}

Problem describe(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& starts,
    const Tensor& tokens,
    const Tensor& families,
    int64_t num_prefix,
    double scale,
    int64_t window,
    double softcap) {
  STD_TORCH_CHECK(
      query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && key.size(1) >= 1 && query.size(1) % key.size(1) == 0,
      "hybrid_rl::packed_attention: query, key and value must be [T, heads, dim], the query's heads a multiple of the key's");
  check_tensor(query, "query", query.size(0), query.size(1), query.size(2));
  check_tensor(key, "key", query.size(0), key.size(1), query.size(2));
  check_tensor(value, "value", query.size(0), key.size(1), value.size(2));
  STD_TORCH_CHECK(
      query.size(2) <= kMaxDim && value.size(2) <= kMaxDim, "hybrid_rl::packed_attention: head dims are at most ", kMaxDim);
  check_segments(starts, tokens, families, num_prefix, query.size(0));
  Problem p{};
  p.query = static_cast<const float*>(query.const_data_ptr());
  p.key = static_cast<const float*>(key.const_data_ptr());
  p.value = static_cast<const float*>(value.const_data_ptr());
  p.starts = static_cast<const int64_t*>(starts.const_data_ptr());
  p.tokens = static_cast<const int64_t*>(tokens.const_data_ptr());
  p.families = static_cast<const int64_t*>(families.const_data_ptr());
  p.num_families = families.size(0) - 1;
  p.num_prefix = num_prefix;
  p.num_heads = query.size(1);
  p.num_kv_heads = key.size(1);
  p.key_dim = query.size(2);
  p.value_dim = value.size(2);
  p.scale = static_cast<float>(scale);
  p.window = window;
  p.softcap = static_cast<float>(softcap);
  return p;
}

void run(const Problem& p) {
  double work = 0.0;
  for (int64_t family = 0; family < p.num_families; ++family) {
    const double before = static_cast<double>(family > 0 ? p.num_prefix : 0);
    const double root = static_cast<double>(p.tokens[p.families[family]]);
    work += root * (before + root / 2);
    for (int64_t child = p.families[family] + 1; child < p.families[family + 1]; ++child) {
      work += p.tokens[child] * (before + root + p.tokens[child] / 2.0);
    }
  }
  work *= static_cast<double>(p.num_heads * (p.key_dim + p.value_dim));
  const int64_t num_tasks = p.num_families * p.num_kv_heads;
  const int64_t grain = work < kSerialWork ? std::max<int64_t>(num_tasks, 1) : 1;
  torch::stable::parallel_for(0, num_tasks, grain, [&](int64_t begin, int64_t end) { attend_families(p, begin, end); });
}

Tensor new_rows(const Tensor& tensor, int64_t num_rows) {
  const int64_t sizes[3] = {num_rows, tensor.size(1), tensor.size(2)};
  return torch::stable::new_empty(tensor, {sizes, 3}, ScalarType::Float);
}

// rows[P, width] += the sum of parts[F - 1, P, width] over the families, in their order.
void add_parts(const Problem& p, const float* parts, int64_t width, float* rows) {
  const int64_t size = p.num_prefix * width;
  torch::stable::parallel_for(0, size, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t family = 0; family + 1 < p.num_families; ++family) {
      for (int64_t i = begin; i < end; ++i) {
        rows[i] += parts[family * size + i];
      }
    }
  });
}

std::tuple<Tensor, Tensor> packed_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& starts,
    const Tensor& tokens,
    const Tensor& families,
    int64_t num_prefix,
    double scale,
    int64_t window,
    double softcap) {
  Problem p = describe(query, key, value, starts, tokens, families, num_prefix, scale, window, softcap);
  const int64_t out_sizes[3] = {query.size(0), query.size(1), value.size(2)};
  Tensor out = torch::stable::new_empty(query, {out_sizes, 3}, ScalarType::Float);
  const int64_t lse_sizes[2] = {query.size(0), query.size(1)};
  Tensor lse = torch::stable::new_empty(query, {lse_sizes, 2}, ScalarType::Float);
  p.out = static_cast<float*>(out.mutable_data_ptr());
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  run(p);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> packed_attention_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& out,
    const Tensor& lse,
    const Tensor& starts,
    const Tensor& tokens,
    const Tensor& families,
    int64_t num_prefix,
    double scale,
    int64_t window,
    double softcap) {
  Problem p = describe(query, key, value, starts, tokens, families, num_prefix, scale, window, softcap);
  check_tensor(grad, "grad", query.size(0), query.size(1), value.size(2));
  check_tensor(out, "out", query.size(0), query.size(1), value.size(2));
  STD_TORCH_CHECK(
      lse.dim() == 2 && lse.size(0) == query.size(0) && lse.size(1) == query.size(1) &&
          lse.scalar_type() == ScalarType::Float && lse.is_contiguous(),
      "hybrid_rl::packed_attention: lse must be contiguous float32 [T, H]");
  Tensor grad_query = new_rows(query, query.size(0));
  Tensor grad_key = new_rows(key, key.size(0));
  Tensor grad_value = new_rows(value, value.size(0));
  const int64_t num_parts = num_prefix * (p.num_families - 1);
  Tensor key_parts = new_rows(key, num_parts);
  Tensor value_parts = new_rows(value, num_parts);
  p.grad = static_cast<const float*>(grad.const_data_ptr());
  p.out = static_cast<float*>(const_cast<void*>(out.const_data_ptr()));
  p.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));
  p.grad_query = static_cast<float*>(grad_query.mutable_data_ptr());
  p.grad_key = static_cast<float*>(grad_key.mutable_data_ptr());
  p.grad_value = static_cast<float*>(grad_value.mutable_data_ptr());
  p.prefix_grad_key = static_cast<float*>(key_parts.mutable_data_ptr());
  p.prefix_grad_value = static_cast<float*>(value_parts.mutable_data_ptr());
  run(p);
  if (num_prefix > 0) {
    add_parts(p, p.prefix_grad_key, p.num_kv_heads * p.key_dim, p.grad_key);
    add_parts(p, p.prefix_grad_value, p.num_kv_heads * p.value_dim, p.grad_value);
  }
  return {grad_query, grad_key, grad_value};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def(
      "packed_attention(Tensor query, Tensor key, Tensor value, Tensor starts, Tensor tokens, Tensor families, int num_prefix, "
      "float scale, int window, float softcap) -> (Tensor, Tensor)");
  library.def(
      "packed_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor starts, "
      "Tensor tokens, Tensor families, int num_prefix, float scale, int window, float softcap) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("packed_attention", TORCH_BOX(&packed_attention));
  library.impl("packed_attention_backward", TORCH_BOX(&packed_attention_backward));
}
