// The kernel of low_rank_merge for CUDA.
//
// A block computes a tile of kTileRows rows and kTileColumns columns of one expert: a thread has kRows rows, and kColumns
// columns that lie 32 apart, so that a warp reads and writes neighbours. The factors come through shared memory, kDepth of
// the rank at a time. Products and sums are intrinsics, which the compiler never joins into one operation.

#include "low_rank_batch.h"
#include "strided_copy_group.cuh"

#include <cstring>

namespace hybrid_rl::low_rank {
namespace {

using strided::convert_bits;
using strided::kBFloat16;
using strided::kFloat;
using strided::kHalf;

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 3; // sixteen sums and their places need more registers than four blocks leave
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4; // of a thread
constexpr int kColumns = 4;
constexpr int kTileRows = kWarps * kRows;
constexpr int kTileColumns = 32 * kColumns;
constexpr int kDepth = 16;

__host__ __device__ constexpr int64_t tiles(int64_t extent, int64_t size) {
  return (extent + size - 1) / size;
}

__device__ __forceinline__ float load_element(const char* base, int64_t at, int32_t type) {
  if (type == kFloat) {
    return reinterpret_cast<const float*>(base)[at];
  }
  const uint32_t bits = reinterpret_cast<const uint16_t*>(base)[at];
  return __uint_as_float(type == kBFloat16 ? convert_bits<kBFloat16, kFloat>(bits) : convert_bits<kHalf, kFloat>(bits));
}

// A NaN becomes the canonical one of the dtype.
__device__ __forceinline__ void store_element(char* target, int64_t at, int32_t type, float value) {
  const uint32_t bits = __float_as_uint(value);
  if (type == kFloat) {
    reinterpret_cast<uint32_t*>(target)[at] = convert_bits<kFloat, kFloat>(bits);
  } else {
    reinterpret_cast<uint16_t*>(target)[at] = static_cast<uint16_t>(
        type == kBFloat16 ? convert_bits<kFloat, kBFloat16>(bits) : convert_bits<kFloat, kHalf>(bits));
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) low_rank_kernel(
    const Merge* __restrict__ entries, const int64_t* __restrict__ first_blocks, int num_entries) {
  __shared__ float left[kDepth][kTileRows + 1]; // lines begin in different banks
  __shared__ float right[kDepth][kTileColumns];
  int low = 0, high = num_entries; // the last entry whose first block is not after this one
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_blocks[middle] <= blockIdx.x ? low : high) = middle;
  }
  const Merge& m = entries[low];
  const int64_t block = blockIdx.x - first_blocks[low];
  const int64_t across = tiles(m.shape[2], kTileColumns), down = tiles(m.shape[1], kTileRows);
  const int64_t first_column = block % across * kTileColumns, first_row = block / across % down * kTileRows;
  const int64_t expert = block / across / down;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const left_corner = m.left + expert * m.left_strides[0] + first_row * m.left_strides[1];
  const float* const right_corner = m.right + expert * m.right_strides[0] + first_column * m.right_strides[1];
  const int height = static_cast<int>(m.shape[1] - first_row < kTileRows ? m.shape[1] - first_row : kTileRows);
  const int width = static_cast<int>(m.shape[2] - first_column < kTileColumns ? m.shape[2] - first_column : kTileColumns);
  const int rank = static_cast<int>(m.rank);
  float sums[kRows][kColumns] = {};
  for (int done = 0; done < rank; done += kDepth) {
    const int depth = rank - done < kDepth ? rank - done : kDepth;
    for (int i = threadIdx.x; i < kTileRows * kDepth; i += kThreads) {
      const int row = i / kDepth, k = i % kDepth;
      left[k][row] = row < height && k < depth ? left_corner[row * m.left_strides[1] + (done + k) * m.left_strides[2]] : 0.0f;
    }
    for (int i = threadIdx.x; i < kTileColumns * kDepth; i += kThreads) {
      const int k = i / kTileColumns, column = i % kTileColumns;
      right[k][column] =
          column < width && k < depth ? right_corner[column * m.right_strides[1] + (done + k) * m.right_strides[2]] : 0.0f;
    }
    __syncthreads();
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const float factor = right[k][column * 32 + lane];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          sums[row][column] = __fadd_rn(sums[row][column], __fmul_rn(left[k][warp * kRows + row], factor));
        }
      }
    }
    __syncthreads(); // the next factors take their place
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first_row + warp * kRows + i;
    if (warp * kRows + i >= height) {
      break;
    }
    const int64_t read = expert * m.base_strides[0] + row * m.base_strides[1];
    const int64_t written = expert * m.destination_strides[0] + row * m.destination_strides[1];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t column = first_column + j * 32 + lane;
      if (j * 32 + lane < width) {
        float value = __fadd_rn(sums[i][j], load_element(m.base, read + column * m.base_strides[2], m.base_type));
        if (m.factor != nullptr) {
          value = __fmul_rn(value, m.factor[row * m.factor_strides[0] + column * m.factor_strides[1]]);
        }
        store_element(m.destination, written + column * m.destination_strides[2], m.destination_type, value);
      }
    }
  }
}

} // namespace

Batch::Batch(const int64_t* table, int64_t num_rows) {
  std::vector<Merge> entries;
  std::vector<int64_t> first_blocks;
  for (int64_t i = 0; i < num_rows; ++i) {
    const Merge merge = merge_of(table + i * kNumColumns);
    const int64_t count = merge.shape[0] * tiles(merge.shape[1], kTileRows) * tiles(merge.shape[2], kTileColumns);
    if (count > 0) {
      entries.push_back(merge);
      first_blocks.push_back(num_blocks_);
      num_blocks_ += count;
    }
  }
  num_entries_ = static_cast<int64_t>(entries.size());
  upload_.resize(entries.size() * (sizeof(Merge) + sizeof(int64_t)));
  if (!entries.empty()) {
    std::memcpy(upload_.data(), entries.data(), entries.size() * sizeof(Merge));
    std::memcpy(upload_.data() + entries.size() * sizeof(Merge), first_blocks.data(), entries.size() * sizeof(int64_t));
  }
}

cudaError_t Batch::launch(void* memory, cudaStream_t stream) const {
  // From pageable memory: the call returns when the data has been taken.
  const cudaError_t error = cudaMemcpyAsync(memory, upload_.data(), upload_.size(), cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) {
    return error;
  }
  const auto* entries = static_cast<const Merge*>(memory);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks_));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(
      &config, low_rank_kernel, entries, reinterpret_cast<const int64_t*>(entries + num_entries_), static_cast<int>(num_entries_));
}

} // namespace hybrid_rl::low_rank
