// What the kernels of strided_copy for CUDA offer to whoever launches them: a table of pieces, sorted by kernel.
//
// Nothing here knows PyTorch, so that the kernels compile in seconds, and as C++ over a stand-in of CUDA.

#pragma once

#include "strided_copy.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_rl::strided {

// How a kernel moves a piece. kAligned: 16 bytes at a time on both sides. kShifted: rows that run through on both sides,
// but begin or end between two words of 16 bytes. kTurned: the source runs through along another dim than the
// destination. kScattered: everything else, one element at a time.
enum Path : int32_t { kAligned, kShifted, kTurned, kScattered };
constexpr int kNumPaths = 4;
constexpr int kNumWidths = 6; // pairs of element sizes, see width_of in strided_copy_kernels.cu

// A unit is what one thread moves at once (kTurned: one block). A kernel counts the units of a piece in 32 bits.
constexpr int64_t kMostUnits = int64_t{1} << 31;

struct Entry {
  Piece piece;
  int32_t pair; // of dtypes
  uint32_t num_units;
  bool wide_source, wide_target; // kTurned: every line is aligned to 16 bytes
};

// The pieces of one call. Sources may lie in the memory of another GPU that the launching one can access.
class Batch {
 public:
  // hashed: whether hashes will be given to launch. most_units: pieces of more are cut in two.
  Batch(const int64_t* table, int64_t num_rows, bool hashed, int64_t most_units = kMostUnits);

  bool empty() const {
    return upload_.empty();
  }

  // The size of the memory that launch needs on the device, a multiple of 8.
  size_t num_bytes() const {
    return upload_.size();
  }

  // Blocks of the largest launch; a grid has at most 2^31 - 1.
  int64_t most_blocks() const;

  // Copies the table to `memory` and launches on the current device. hashes: by slot, null for none.
  cudaError_t launch(void* memory, unsigned long long* hashes, cudaStream_t stream) const;

 private:
  struct Run { // the pieces of one kernel
    int32_t width, path;
    int64_t first, count, num_blocks;
  };

  bool hashed_;
  int64_t num_entries_ = 0;
  std::vector<Run> runs_;
  std::vector<char> upload_; // entries, then the number of the first block of each
};

} // namespace hybrid_rl::strided
