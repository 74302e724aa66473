// What the kernel of low_rank_merge for CUDA offers to whoever launches it. Nothing here knows PyTorch.

#pragma once

#include "low_rank.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_rl::low_rank {

// The boxes of one call.
class Batch {
 public:
  Batch(const int64_t* table, int64_t num_rows);

  bool empty() const {
    return num_blocks_ == 0;
  }

  // The size of the memory that launch needs on the device, a multiple of 8.
  size_t num_bytes() const {
    return upload_.size();
  }

  // A grid has at most 2^31 - 1.
  int64_t num_blocks() const {
    return num_blocks_;
  }

  // Copies the table to `memory` and launches on the current device.
  cudaError_t launch(void* memory, cudaStream_t stream) const;

 private:
  int64_t num_entries_ = 0, num_blocks_ = 0;
  std::vector<char> upload_; // boxes, then the number of the first block of each
};

} // namespace hybrid_rl::low_rank
