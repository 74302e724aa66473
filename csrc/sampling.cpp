// Counter-based uniform noise for sampling: Philox-4x32-10, J. Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011. Each element is a pure function of (seed, position, column), so that a sampled token does not
// depend on which other requests share its batch. hybrid_rl/native.py holds the PyTorch form, which is the oracle:
// both must agree bit for bit.
//
// Built on LibTorch's stable ABI (no Python.h, no ATen headers): one binary serves several versions of both.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

// The compiler makes one copy per instruction set and the loader picks one: AVX2 has four times the 32x32->64
// multiplications of the x86-64 baseline, and a wheel must still run without it.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRID_RL_TARGETS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HYBRID_RL_TARGETS
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr uint32_t kMultiplier0 = 0xD2511F53u;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u;
constexpr uint32_t kWeyl1 = 0xBB67AE85u;
constexpr uint32_t kDomain = 0x48524Cu; // "HRL": keeps this stream apart from other uses of the same seed
constexpr int kNumRounds = 10;
// Counters computed side by side, so that the compiler vectorises over them. With fewer, GCC unrolls the loops whole
// before it vectorises and the kernel is three times slower.
constexpr int kNumLanes = 64;
constexpr int64_t kBlocksPerTask = 1024; // of four columns each: about 10 microseconds

// Uniforms of the blocks [first_block, last_block) of one row; block j holds the columns 4j .. 4j+3.
HYBRID_RL_TARGETS
void fill_row(
    uint64_t seed,
    uint64_t position,
    int64_t first_block,
    int64_t last_block,
    int64_t num_columns,
    float* row) {
  for (int64_t base = first_block; base < last_block; base += kNumLanes) {
    uint32_t c0[kNumLanes], c1[kNumLanes], c2[kNumLanes], c3[kNumLanes];
    for (int lane = 0; lane < kNumLanes; ++lane) {
      c0[lane] = static_cast<uint32_t>(position);
      c1[lane] = static_cast<uint32_t>(position >> 32);
      c2[lane] = static_cast<uint32_t>(base + lane);
      c3[lane] = kDomain;
    }
    uint32_t k0 = static_cast<uint32_t>(seed);
    uint32_t k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kNumRounds; ++round) {
      for (int lane = 0; lane < kNumLanes; ++lane) {
        const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c0[lane];
        const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c2[lane];
        c0[lane] = static_cast<uint32_t>(product1 >> 32) ^ c1[lane] ^ k0;
        c1[lane] = static_cast<uint32_t>(product1);
        c2[lane] = static_cast<uint32_t>(product0 >> 32) ^ c3[lane] ^ k1;
        c3[lane] = static_cast<uint32_t>(product0);
      }
      k0 += kWeyl0;
      k1 += kWeyl1;
    }
    float uniforms[kNumLanes * 4];
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const uint32_t words[4] = {c0[lane], c1[lane], c2[lane], c3[lane]};
      for (int word = 0; word < 4; ++word) {
        // 23 bits: with 24, x + 0.5 has no exact float32 and the largest value would round to 1.
        uniforms[4 * lane + word] = (static_cast<float>(static_cast<int32_t>(words[word] >> 9)) + 0.5f) * 0x1p-23f;
      }
    }
    const int64_t first_column = 4 * base;
    const int64_t num_wanted = std::min(4 * std::min<int64_t>(kNumLanes, last_block - base), num_columns - first_column);
    std::copy(uniforms, uniforms + num_wanted, row + first_column);
  }
}

Tensor keyed_uniform(const Tensor& seeds, const Tensor& positions, int64_t num_columns) {
  STD_TORCH_CHECK(
      seeds.dim() == 1 && positions.dim() == 1 && seeds.size(0) == positions.size(0),
      "hybrid_rl::keyed_uniform: seeds and positions must be one-dimensional and of one length");
  STD_TORCH_CHECK(
      seeds.scalar_type() == ScalarType::Long && positions.scalar_type() == ScalarType::Long,
      "hybrid_rl::keyed_uniform: seeds and positions must be int64");
  STD_TORCH_CHECK(
      seeds.is_contiguous() && positions.is_contiguous(),
      "hybrid_rl::keyed_uniform: seeds and positions must be contiguous");
  STD_TORCH_CHECK(num_columns >= 1, "hybrid_rl::keyed_uniform: num_columns must be at least 1, got ", num_columns);

  const int64_t num_rows = seeds.size(0);
  const int64_t sizes[2] = {num_rows, num_columns};
  Tensor noise = torch::stable::new_empty(seeds, {sizes, 2}, ScalarType::Float);
  const int64_t* seed = static_cast<const int64_t*>(seeds.const_data_ptr());
  const int64_t* position = static_cast<const int64_t*>(positions.const_data_ptr());
  float* values = static_cast<float*>(noise.mutable_data_ptr());

  const int64_t num_blocks = (num_columns + 3) / 4;
  const int64_t tasks_per_row = (num_blocks + kBlocksPerTask - 1) / kBlocksPerTask;
  const int64_t grain_size = std::max<int64_t>(1, 4 * kBlocksPerTask / num_blocks);
  torch::stable::parallel_for(0, num_rows * tasks_per_row, grain_size, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / tasks_per_row;
      const int64_t first_block = task % tasks_per_row * kBlocksPerTask;
      const int64_t last_block = std::min(first_block + kBlocksPerTask, num_blocks);
      fill_row(
          static_cast<uint64_t>(seed[row]),
          static_cast<uint64_t>(position[row]),
          first_block,
          last_block,
          num_columns,
          values + row * num_columns);
    }
  });
  return noise;
}

} // namespace

// A fragment: every source file of the extension declares its own operators in the one namespace.
STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("keyed_uniform(Tensor seeds, Tensor positions, int num_columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("keyed_uniform", TORCH_BOX(&keyed_uniform));
}
