// Batched copy-and-cast of strided pieces on the CPU, with the content hash of what is written: all pieces of a bucket
// in one call. The PyTorch form in hybrid_rl/resharding/execute.py is its oracle, bit for bit.
//
// A piece is cut into units of at most kUnit elements of its innermost dim. Eight units are walked side by side: eight
// pages at a time keep more of the memory's requests in flight than one, which is what large memcpys do too. What is
// written bypasses the caches where it is aligned: it is far more than they hold, and the engine reads it much later.

#include "convert.h"
#include "lanes.h"
#include "strided_copy.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

using namespace hybrid_rl::strided;
using hybrid_rl::Floats;
using hybrid_rl::Ints;
using hybrid_rl::kLanes;
using hybrid_rl::Words;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kUnit = 16384; // elements
constexpr int64_t kStep = 4 * kLanes; // elements of a unit before the next unit has its turn
constexpr int kAbreast = 8; // units walked side by side
constexpr int64_t kAhead = 1024; // bytes that are asked for in advance
constexpr int64_t kTile = 64; // rows and columns that are transposed at once
constexpr int64_t kSerialBytes = 1 << 18; // below, threads cost more than they bring

// ------------------------------------------------------------------------------------------------ a step of 32

template <typename Vector>
HYBRID_RL_INLINE void put(char* target, Vector lanes, bool bypass) {
#ifdef __SSE2__
  if (bypass && sizeof(lanes) % 16 == 0) {
    __m128i parts[sizeof(lanes) / 16];
    std::memcpy(parts, &lanes, sizeof(lanes));
    for (size_t i = 0; i < sizeof(lanes) / 16; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target) + i, parts[i]);
    }
    return;
  }
#endif
  std::memcpy(target, &lanes, sizeof(lanes));
}

template <int32_t kType>
HYBRID_RL_INLINE void store_bits(char* target, Words bits, bool bypass) {
  if constexpr (size_of(kType) == 4) {
    put(target, bits, bypass);
  } else if constexpr (size_of(kType) == 2) {
    put(target, __builtin_convertvector(bits, Halves), bypass);
  } else {
    put(target, __builtin_convertvector(bits, Bytes), bypass);
  }
}

// The terms of elements whose numbers are `stride` apart; weyl: of the first one. A plain loop: in its own vectors GCC
// multiplies 32 by 32 bits, in those of lanes.h it cannot. In two sums, or it would add before it multiplies 64 by 64.
HYBRID_RL_INLINE uint64_t sum_of_terms(const uint32_t* bits, int64_t count, uint32_t weyl, uint32_t stride, uint32_t second) {
  uint64_t products = 0, flips = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t flipped = bits[i] ^ kFlip;
    products += static_cast<uint64_t>(flipped) * key_of(weyl + static_cast<uint32_t>(i) * stride, second);
    flips += flipped;
  }
  return products + flips;
}

// Runs of `length` elements that are walked side by side.
struct Walk {
  const char* source[kAbreast];
  char* target[kAbreast];
  uint64_t number[kAbreast]; // of the run's first element
  int64_t length;
  int64_t stride; // from an element's number to the next one's
  uint64_t seed;
  bool bypass; // the caches; the targets are aligned
};

template <int32_t kFrom, int32_t kTo, bool kWrites, bool kHashes, int kRuns>
HYBRID_RL_INLINE uint64_t walk_runs(const Walk& w) {
  constexpr int64_t from = size_of(kFrom), to = size_of(kTo);
  const uint32_t stride = static_cast<uint32_t>(w.stride) * kWeyl;
  uint64_t sum = 0;
  uint32_t weyl[kRuns], second[kRuns];
  for (int run = 0; kHashes && run < kRuns; ++run) {
    const Seeds seeds = seeds_of(w.seed, static_cast<uint32_t>(w.number[run] >> 32));
    weyl[run] = static_cast<uint32_t>(w.number[run]) * kWeyl + seeds.first;
    second[run] = seeds.second;
  }
  alignas(64) uint32_t bits[kStep];
  int64_t at = 0;
  for (; at + kStep <= w.length; at += kStep) {
#pragma GCC unroll 8
    for (int run = 0; run < kRuns; ++run) {
      const char* source = w.source[run] + at * from;
      char* target = w.target[run] + at * to;
      for (int64_t line = 0; line < kStep * from; line += 64) {
        __builtin_prefetch(source + kAhead + line);
      }
      if constexpr (kFrom == kTo && !kHashes) {
        for (int64_t byte = 0; byte < kStep * to; byte += 64) {
          put(target + byte, read<Words>(source + byte), w.bypass);
        }
        continue;
      }
      for (int64_t group = 0; group < kStep; group += kLanes) {
        const Words lanes = convert<kFrom, kTo>(load_bits<kFrom>(source + group * from));
        if constexpr (kWrites) {
          store_bits<kTo>(target + group * to, lanes, w.bypass);
        }
        if constexpr (kHashes) {
          std::memcpy(bits + group, &lanes, sizeof(lanes));
        }
      }
      if constexpr (kHashes) {
        sum += sum_of_terms(bits, kStep, weyl[run] + static_cast<uint32_t>(at) * stride, stride, second[run]);
      }
    }
  }
  const int64_t rest = w.length - at;
  for (int run = 0; rest > 0 && run < kRuns; ++run) {
    char padded[kStep * 4] = {}, converted[kStep * 4];
    std::memcpy(padded, w.source[run] + at * from, rest * from);
    for (int64_t group = 0; group < kStep; group += kLanes) {
      const Words lanes = convert<kFrom, kTo>(load_bits<kFrom>(padded + group * from));
      store_bits<kTo>(converted + group * to, lanes, false);
      std::memcpy(bits + group, &lanes, sizeof(lanes));
    }
    if constexpr (kWrites) {
      std::memcpy(w.target[run] + at * to, converted, rest * to);
    }
    if constexpr (kHashes) {
      sum += sum_of_terms(bits, rest, weyl[run] + static_cast<uint32_t>(at) * stride, stride, second[run]);
    }
  }
  return sum;
}

enum Work { kCopies, kHashes, kCopiesAndHashes };

template <int32_t kFrom, int32_t kTo>
HYBRID_RL_INLINE uint64_t walk_one_as(const Walk& w, Work work) {
  return work == kCopies ? walk_runs<kFrom, kTo, true, false, 1>(w)
      : work == kHashes  ? walk_runs<kFrom, kTo, false, true, 1>(w)
                         : walk_runs<kFrom, kTo, true, true, 1>(w);
}

HYBRID_RL_TARGETS
uint64_t walk_one(const Walk& w, int32_t from, int32_t to, Work work) {
  switch (pair_of(from, to)) {
    case 1:
      return walk_one_as<kBytes1, kBytes1>(w, work);
    case 2:
      return walk_one_as<kBytes2, kBytes2>(w, work);
    case 4:
      return walk_one_as<kBytes4, kBytes4>(w, work);
    case pair_of(kFloat, kBFloat16):
      return walk_one_as<kFloat, kBFloat16>(w, work);
    case pair_of(kFloat, kHalf):
      return walk_one_as<kFloat, kHalf>(w, work);
    case pair_of(kBFloat16, kFloat):
      return walk_one_as<kBFloat16, kFloat>(w, work);
    case pair_of(kBFloat16, kHalf):
      return walk_one_as<kBFloat16, kHalf>(w, work);
    case pair_of(kHalf, kFloat):
      return walk_one_as<kHalf, kFloat>(w, work);
    default:
      return walk_one_as<kHalf, kBFloat16>(w, work);
  }
}

template <int32_t kFrom, int32_t kTo>
HYBRID_RL_INLINE uint64_t walk_abreast_as(const Walk& w, Work work) {
  return work == kCopies ? walk_runs<kFrom, kTo, true, false, kAbreast>(w) : walk_runs<kFrom, kTo, true, true, kAbreast>(w);
}

// The dtypes of large weights: code for every pair would be slow to compile.
bool has_abreast(int32_t from, int32_t to, Work work) {
  const int32_t pair = pair_of(from, to);
  return work != kHashes && (pair == 2 || pair == 4 || pair == pair_of(kFloat, kBFloat16));
}

HYBRID_RL_TARGETS
uint64_t walk_abreast(const Walk& w, int32_t from, int32_t to, Work work) {
  switch (pair_of(from, to)) {
    case 2:
      return walk_abreast_as<kBytes2, kBytes2>(w, work);
    case 4:
      return walk_abreast_as<kBytes4, kBytes4>(w, work);
    default:
      return walk_abreast_as<kFloat, kBFloat16>(w, work);
  }
}

// ------------------------------------------------------------------------------------------------------- a piece

bool is_aligned(const char* address) {
  return reinterpret_cast<uintptr_t>(address) % 64 == 0;
}

// How a piece is cut: into units of equal work, which threads share.
class Cut {
 public:
  Cut(const Piece& piece, bool hashes) : p_(piece), from_(size_of(p_.source_type)), to_(size_of(p_.destination_type)) {
    work_ = p_.destination == nullptr ? kHashes : hashes ? kCopiesAndHashes : kCopies;
    if (!p_.is_run() && p_.destination != nullptr) {
      turn();
    }
    num_rows_ = p_.num_elements / row_length();
    if (transposed_) {
      num_rows_ /= p_.shape[kDims - 2];
      units_per_row_ = tiles(p_.shape[kDims - 2]) * tiles(row_length());
    } else {
      // As equal as whole steps allow: what is walked abreast ends with the shortest.
      const int64_t most = p_.is_run() ? kUnit : kTile * kTile / 4;
      const int64_t fewest = (row_length() + most - 1) / most;
      unit_ = std::min(most, ((row_length() + fewest - 1) / fewest + kStep - 1) / kStep * kStep);
      units_per_row_ = (row_length() + unit_ - 1) / unit_;
    }
  }

  int64_t num_units() const {
    return num_rows_ * units_per_row_;
  }

  int64_t num_bytes() const {
    return p_.num_elements * (from_ + (work_ == kHashes ? 0 : to_));
  }

  uint64_t run(int64_t first, int64_t last) const {
    uint64_t sum = 0;
    for (int64_t unit = first; unit < last;) {
      if (transposed_) {
        sum += run_tile(unit++);
      } else if (!p_.is_run()) {
        sum += run_strided(unit++);
      } else {
        const int64_t count = unit + kAbreast <= last ? kAbreast : 1;
        sum += run_units(unit, count);
        unit += count;
      }
    }
    return sum;
  }

 private:
  static int64_t tiles(int64_t extent) {
    return (extent + kTile - 1) / kTile;
  }

  int64_t row_length() const {
    return p_.shape[kDims - 1];
  }

  // Brings the dim that runs through in the source beside the one that runs through in the destination.
  void turn() {
    if (p_.destination_strides[kDims - 1] != 1 || row_length() < 8) {
      return;
    }
    for (int dim = 0; dim + 1 < kDims; ++dim) {
      if (p_.source_strides[dim] == 1 && p_.shape[dim] >= 8) {
        detail::swap_dims(p_, dim, kDims - 2);
        transposed_ = true;
        return;
      }
    }
  }

  struct Place {
    const char* source;
    char* target;
    uint64_t number;
  };

  // Where a row begins, counted over the dims before `inner`.
  Place row(int64_t index, int inner) const {
    Place place{p_.source, p_.destination, p_.number};
    for (int dim = inner - 1; dim >= 0 && index > 0; --dim) {
      const int64_t at = index % p_.shape[dim];
      index /= p_.shape[dim];
      place = step(place, dim, at);
    }
    return place;
  }

  Place step(Place place, int dim, int64_t count) const {
    place.source += count * p_.source_strides[dim] * from_;
    place.target += count * p_.destination_strides[dim] * to_;
    place.number += static_cast<uint64_t>(count * p_.global_strides[dim]);
    return place;
  }

  uint64_t run_units(int64_t first, int64_t count) const {
    Walk w{};
    Place places[kAbreast];
    int64_t lengths[kAbreast];
    w.stride = p_.global_strides[kDims - 1];
    w.seed = p_.seed;
    w.bypass = true;
    w.length = kUnit;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = (first + i) % units_per_row_ * unit_;
      places[i] = step(row((first + i) / units_per_row_, kDims - 1), kDims - 1, begin);
      lengths[i] = std::min(unit_, row_length() - begin);
      w.source[i] = places[i].source;
      w.target[i] = places[i].target;
      w.number[i] = places[i].number;
      w.length = std::min(w.length, stays_below(places[i].number, lengths[i]) ? lengths[i] : 0);
      w.bypass = w.bypass && is_aligned(places[i].target);
    }
    uint64_t sum = 0;
    int64_t done = 0;
    if (count == kAbreast && w.length >= kStep && has_abreast(p_.source_type, p_.destination_type, work_)) {
      sum = walk_abreast(w, p_.source_type, p_.destination_type, work_);
      done = w.length;
    }
    for (int64_t i = 0; i < count; ++i) {
      sum += walk(step(places[i], kDims - 1, done), lengths[i] - done);
    }
    return sum;
  }

  // Whether the numbers of a run share their upper half, by which it is keyed.
  bool stays_below(uint64_t number, int64_t length) const {
    return number >> 32 == (number + static_cast<uint64_t>((length - 1) * p_.global_strides[kDims - 1])) >> 32;
  }

  // One run, in parts where the upper half of its numbers changes. bypass: the caches, if the target is aligned.
  uint64_t walk(Place place, int64_t length, int dim = kDims - 1, bool bypass = true) const {
    Walk w{};
    w.stride = p_.global_strides[dim];
    w.seed = p_.seed;
    uint64_t sum = 0;
    while (length > 0) {
      const uint64_t left = (uint64_t{1} << 32) - (place.number & 0xFFFFFFFFu);
      const uint64_t fits = w.stride > 0 ? (left + w.stride - 1) / w.stride : static_cast<uint64_t>(length);
      w.length = static_cast<int64_t>(std::min<uint64_t>(fits, length));
      w.source[0] = place.source;
      w.target[0] = place.target;
      w.number[0] = place.number;
      w.bypass = bypass && is_aligned(place.target);
      sum += walk_one(w, p_.source_type, p_.destination_type, work_);
      length -= w.length;
      place.source += w.length * from_;
      place.target += w.length * to_;
      place.number += static_cast<uint64_t>(w.length * w.stride);
    }
    return sum;
  }

  // Elements that lie apart in the source or the destination: gathered, converted, scattered.
  uint64_t run_strided(int64_t unit) const {
    char gathered[kTile * kTile], converted[kTile * kTile];
    const int64_t begin = unit % units_per_row_ * unit_;
    const int64_t length = std::min(unit_, row_length() - begin);
    const Place place = step(row(unit / units_per_row_, kDims - 1), kDims - 1, begin);
    spread(gathered, from_, place.source, p_.source_strides[kDims - 1] * from_, length, from_);
    const uint64_t sum = walk({gathered, converted, place.number}, length, kDims - 1, false);
    if (work_ != kHashes) {
      spread(place.target, p_.destination_strides[kDims - 1] * to_, converted, to_, length, to_);
    }
    return sum;
  }

  // The last two dims are the source's and the destination's innermost.
  uint64_t run_tile(int64_t unit) const {
    char line[kTile * 4];
    alignas(64) char tile[kTile * kTile * 4];
    const int64_t within = unit % units_per_row_, across = tiles(row_length());
    const int64_t top = within / across * kTile, left = within % across * kTile;
    const int64_t height = std::min(kTile, p_.shape[kDims - 2] - top), width = std::min(kTile, row_length() - left);
    const Place corner = step(step(row(unit / units_per_row_, kDims - 2), kDims - 2, top), kDims - 1, left);
    uint64_t sum = 0;
    for (int64_t column = 0; column < width; ++column) {
      const Place place = step(corner, kDims - 1, column);
      sum += walk({place.source, line, place.number}, height, kDims - 2, false);
      spread(tile + column * to_, kTile * to_, line, to_, height, to_);
    }
    for (int64_t at = 0; at < height; ++at) {
      std::memcpy(step(corner, kDims - 2, at).target, tile + at * kTile * to_, width * to_);
    }
    return sum;
  }

  static void spread(char* target, int64_t target_step, const char* source, int64_t source_step, int64_t count, int64_t size) {
    switch (size) {
      case 1:
        return spread_as<1>(target, target_step, source, source_step, count);
      case 2:
        return spread_as<2>(target, target_step, source, source_step, count);
      default:
        return spread_as<4>(target, target_step, source, source_step, count);
    }
  }

  template <int kSize>
  static void spread_as(char* target, int64_t target_step, const char* source, int64_t source_step, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(target + i * target_step, source + i * source_step, kSize);
    }
  }

  Piece p_;
  int64_t from_, to_;
  int64_t num_rows_, units_per_row_, unit_ = 0;
  Work work_;
  bool transposed_ = false;
};

// ---------------------------------------------------------------------------------------------------- the operator

void check(const Tensor& table, const Tensor& hashes) {
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(1) == kNumColumns && table.scalar_type() == ScalarType::Long && table.is_contiguous(),
      "hybrid_rl::strided_copy: table must be contiguous int64 [P, ", kNumColumns, "]");
  STD_TORCH_CHECK(
      hashes.dim() == 1 && hashes.scalar_type() == ScalarType::Long && hashes.is_contiguous(),
      "hybrid_rl::strided_copy: hashes must be contiguous int64, one-dimensional");
}

// Addresses are the caller's word. hashes: [0] for none.
void strided_copy(const Tensor& table, const Tensor& hashes) {
  check(table, hashes);
  const int64_t* row = static_cast<const int64_t*>(table.const_data_ptr());
  const bool hashed = hashes.size(0) > 0;
  uint64_t* sums = static_cast<uint64_t*>(hashes.mutable_data_ptr());
  std::vector<Cut> cuts;
  std::vector<int64_t> starts{0}; // bytes before each piece
  cuts.reserve(table.size(0));
  starts.reserve(table.size(0) + 1);
  std::vector<int64_t> slots;
  slots.reserve(table.size(0));
  for (int64_t i = 0; i < table.size(0); ++i, row += kNumColumns) {
    const Piece piece = normal_form(row, hashed);
    if (piece.num_elements > 0) {
      cuts.emplace_back(piece, hashed);
      slots.push_back(piece.slot);
      starts.push_back(starts.back() + cuts.back().num_bytes());
    }
  }
  const int64_t num_bytes = starts.back();
  const int64_t shares = num_bytes < kSerialBytes ? 1 : torch::stable::get_num_threads();
  torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * num_bytes / shares, to = end * num_bytes / shares;
    size_t i = std::upper_bound(starts.begin(), starts.end(), from) - starts.begin() - 1;
    for (; i < cuts.size() && starts[i] < to; ++i) {
      // A share owns the units that begin within it.
      const double unit_bytes = static_cast<double>(starts[i + 1] - starts[i]) / cuts[i].num_units();
      const auto unit_at = [&](int64_t byte) {
        return byte <= starts[i] ? 0
            : byte >= starts[i + 1]
            ? cuts[i].num_units()
            : std::min(cuts[i].num_units(), static_cast<int64_t>((byte - starts[i]) / unit_bytes));
      };
      const uint64_t sum = cuts[i].run(unit_at(from), unit_at(to));
      if (hashed) {
        std::atomic_ref<uint64_t>(sums[slots[i]]).fetch_add(sum, std::memory_order_relaxed);
      }
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
  });
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hybrid_rl, library) {
  library.def("strided_copy(Tensor table, Tensor(a!) hashes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CPU, library) {
  library.impl("strided_copy", TORCH_BOX(&strided_copy));
}
