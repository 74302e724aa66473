// What the CPU and the CUDA form of low_rank_merge share: the table of boxes.
//
// A box of a changed tensor is, for each of its experts, (base + sum over k of left[row, k] * right[k, column]) * factor.
// Every product and every sum is rounded to float32 by itself, the sum begins at zero and follows k, and the base comes
// last: so an element has the same bits in whatever box it is, and on whatever machine. The PyTorch form
// (hybrid_rl/weights/low_rank.py) is the oracle.

#pragma once

#include "strided_copy.h"

#include <cstdint>

namespace hybrid_rl::low_rank {

// Columns of the table: int64, one row per box. Strides count elements. base and destination may be the same memory;
// their types are kFloat, kBFloat16 or kHalf. left, right and factor are float32; a factor of 0 is none.
enum Column : int64_t {
  kBase = 0,
  kDestination = 1,
  kBaseType = 2,
  kDestinationType = 3,
  kShape = 4, // experts, rows, columns
  kBaseStrides = 7,
  kDestinationStrides = 10,
  kLeft = 13, // and its strides along experts, rows and k
  kRight = 17, // and its strides along experts, columns and k
  kRank = 21,
  kFactor = 22, // and its strides along rows and columns
  kNumColumns = 25,
};

struct Merge {
  const char* base;
  char* destination;
  int32_t base_type, destination_type;
  int64_t shape[3], base_strides[3], destination_strides[3];
  const float* left;
  int64_t left_strides[3];
  const float* right;
  int64_t right_strides[3];
  int64_t rank;
  const float* factor;
  int64_t factor_strides[2];
};

inline Merge merge_of(const int64_t* row) {
  Merge m{};
  m.base = reinterpret_cast<const char*>(row[kBase]);
  m.destination = reinterpret_cast<char*>(row[kDestination]);
  m.base_type = static_cast<int32_t>(row[kBaseType]);
  m.destination_type = static_cast<int32_t>(row[kDestinationType]);
  m.left = reinterpret_cast<const float*>(row[kLeft]);
  m.right = reinterpret_cast<const float*>(row[kRight]);
  m.rank = row[kRank];
  m.factor = reinterpret_cast<const float*>(row[kFactor]);
  for (int dim = 0; dim < 3; ++dim) {
    m.shape[dim] = row[kShape + dim];
    m.base_strides[dim] = row[kBaseStrides + dim];
    m.destination_strides[dim] = row[kDestinationStrides + dim];
    m.left_strides[dim] = row[kLeft + 1 + dim];
    m.right_strides[dim] = row[kRight + 1 + dim];
  }
  m.factor_strides[0] = row[kFactor + 1];
  m.factor_strides[1] = row[kFactor + 2];
  return m;
}

} // namespace hybrid_rl::low_rank
