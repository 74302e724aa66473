// What the CPU and the CUDA form of strided_copy share: the table of pieces, its normal form, and the content hash.
//
// The hash of a set of elements is, modulo 2^64, the sum over its elements of (x XOR kFlip) * (key + 1). x: the bits of
// an element, at most 32 of them (an element of 8 bytes counts as two of 4). key: a pseudo-random function of the
// tensor's seed and of the element's number in the global tensor; within 2^32 neighbouring numbers it is a bijection.
// A universal hash (Carter and Wegman 1979; "multilinear" in Lemire and Kaser 2014): two sets that differ have the same
// sum with a probability of at most 2^-32, and never if they differ in one element, or by two that changed places.

#pragma once

#include <cstdint>
#include <initializer_list>

#ifdef __CUDACC__
#define HYBRID_RL_SHARED __host__ __device__ inline
#else
#define HYBRID_RL_SHARED inline __attribute__((always_inline))
#endif

namespace hybrid_rl::strided {

constexpr uint32_t kWeyl = 0x9E3779B9u; // the golden ratio: neighbours get keys that have nothing in common
constexpr uint32_t kMix1 = 0x7FEB352Du, kMix2 = 0x846CA68Bu; // C. Wellons, "lowbias32"
constexpr uint32_t kFlip = 0x9E3779B9u; // so that zeros count

struct Seeds {
  uint32_t first, second;
};

// splitmix64's finalizer (Steele et al. 2014) of the tensor's seed and the upper half of an element's number.
HYBRID_RL_SHARED Seeds seeds_of(uint64_t seed, uint32_t upper) {
  uint64_t z = seed + (uint64_t{upper} + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// weyl: the lower half of the element's number times kWeyl, plus the first seed.
HYBRID_RL_SHARED uint32_t key_of(uint32_t weyl, uint32_t second_seed) {
  weyl ^= weyl >> 16;
  weyl = weyl * kMix1 + second_seed;
  weyl ^= weyl >> 15;
  weyl *= kMix2;
  return weyl ^ (weyl >> 16);
}

HYBRID_RL_SHARED uint64_t term_of(uint32_t bits, uint32_t key) {
  const uint64_t flipped = bits ^ kFlip;
  return flipped * key + flipped;
}

// The hash of one element by its number, for whoever walks in no order.
HYBRID_RL_SHARED uint64_t hash_of(uint32_t bits, uint64_t seed, uint64_t number) {
  const Seeds seeds = seeds_of(seed, static_cast<uint32_t>(number >> 32));
  return term_of(bits, key_of(static_cast<uint32_t>(number) * kWeyl + seeds.first, seeds.second));
}

// Dtypes as the table names them: 1, 2 and 4 are plain bytes of that many (8 becomes twice 4), the others convert.
enum Type : int32_t { kBytes1 = 1, kBytes2 = 2, kBytes4 = 4, kBytes8 = 8, kFloat = 16, kBFloat16 = 17, kHalf = 18 };

HYBRID_RL_SHARED constexpr int64_t size_of(int32_t type) {
  return type == kFloat ? 4 : type == kBFloat16 || type == kHalf ? 2 : type;
}

// One number for a pair of dtypes; equal ones are plain bytes of their size.
HYBRID_RL_SHARED constexpr int32_t pair_of(int32_t from, int32_t to) {
  return from == to ? static_cast<int32_t>(size_of(from)) : from * 32 + to;
}

// Columns of the table: int64, one row per piece. Offsets and strides count elements. Destination 0: only hashed.
constexpr int64_t kTableDims = 4;
enum Column : int64_t {
  kSource = 0,
  kDestination = 1,
  kSourceType = 2,
  kDestinationType = 3,
  kShape = 4,
  kSourceStrides = kShape + kTableDims,
  kDestinationStrides = kSourceStrides + kTableDims,
  kGlobalStrides = kDestinationStrides + kTableDims,
  kGlobalOffset = kGlobalStrides + kTableDims,
  kSeed,
  kSlot,
  kNumColumns,
};

constexpr int kDims = 5; // the table's, and one for the halves of 8 bytes

// A piece in normal form: dims of extent 1 are gone, dims that run through are one, and the last one has the smallest
// stride in the destination. Unused dims are in front, of extent 1.
struct Piece {
  const char* source;
  char* destination;
  int32_t source_type, destination_type;
  int64_t shape[kDims], source_strides[kDims], destination_strides[kDims], global_strides[kDims];
  uint64_t number; // of the first element in the global tensor
  uint64_t seed;
  int64_t slot;
  int64_t num_elements;

  HYBRID_RL_SHARED bool is_run() const {
    return source_strides[kDims - 1] == 1 && destination_strides[kDims - 1] == 1;
  }
};

namespace detail {

inline void swap_dims(Piece& p, int a, int b) {
  for (int64_t* column : {p.shape, p.source_strides, p.destination_strides, p.global_strides}) {
    const int64_t kept = column[a];
    column[a] = column[b];
    column[b] = kept;
  }
}

inline void fill_dim(Piece& p, int dim, int64_t extent, int64_t stride) {
  p.shape[dim] = extent;
  p.source_strides[dim] = p.destination_strides[dim] = p.global_strides[dim] = stride;
}

// Moves the dims of extent 1 to the front and joins neighbours that run through in all that is walked.
inline void join_dims(Piece& p, bool hashed) {
  int last = kDims - 1; // the dim that was joined into
  for (int dim = kDims - 2; dim >= 0; --dim) {
    if (p.shape[dim] == 1) {
      continue;
    }
    const int64_t extent = p.shape[last];
    if (extent == 1) {
      swap_dims(p, dim, last);
    } else if (
        p.source_strides[dim] == p.source_strides[last] * extent &&
        p.destination_strides[dim] == p.destination_strides[last] * extent &&
        (!hashed || p.global_strides[dim] == p.global_strides[last] * extent)) {
      p.shape[last] *= p.shape[dim];
      fill_dim(p, dim, 1, 0);
    } else {
      --last;
      if (last != dim) {
        swap_dims(p, dim, last);
      }
    }
  }
}

} // namespace detail

// The normal form of a row of the table. Where nothing is written the source tells the order.
inline Piece normal_form(const int64_t* row, bool hashed) {
  Piece p{};
  p.source = reinterpret_cast<const char*>(row[kSource]);
  p.destination = reinterpret_cast<char*>(row[kDestination]);
  p.source_type = static_cast<int32_t>(row[kSourceType]);
  p.destination_type = static_cast<int32_t>(row[kDestinationType]);
  p.number = static_cast<uint64_t>(row[kGlobalOffset]);
  p.seed = static_cast<uint64_t>(row[kSeed]);
  p.slot = row[kSlot];
  const int64_t words = p.source_type == kBytes8 ? 2 : 1;
  if (words == 2) {
    p.source_type = p.destination_type = kBytes4;
    p.number *= 2;
  }
  p.num_elements = words;
  for (int dim = 0; dim < kTableDims; ++dim) {
    p.shape[dim] = row[kShape + dim];
    p.source_strides[dim] = row[kSourceStrides + dim] * words;
    p.destination_strides[dim] = p.destination == nullptr ? p.source_strides[dim] : row[kDestinationStrides + dim] * words;
    p.global_strides[dim] = row[kGlobalStrides + dim] * words;
    p.num_elements *= p.shape[dim];
  }
  for (int dim = 1; dim < kTableDims; ++dim) { // by destination stride, the largest first
    for (int at = dim; at > 0 && p.destination_strides[at - 1] < p.destination_strides[at]; --at) {
      detail::swap_dims(p, at - 1, at);
    }
  }
  detail::fill_dim(p, kDims - 1, words, 1);
  detail::join_dims(p, hashed);
  return p;
}

} // namespace hybrid_rl::strided
