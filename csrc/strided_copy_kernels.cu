// The kernels of strided_copy for CUDA: batched copy-and-cast of strided pieces, with the content hash of what is written.
//
// There is one kernel for each pair of element sizes and each path (strided_copy_batch.h): a kernel needs the registers
// of its worst line, so one for everything would leave room for few threads. Four blocks of 256 threads run on each
// multiprocessor, which keeps several times the bytes under way that its memory needs to be busy. A block finds its part
// in the prefix sum of the pieces' blocks.

#include "strided_copy_batch.h"
#include "strided_copy_group.cuh"

#include <algorithm>
#include <cstring>

namespace hybrid_rl::strided {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kTile = 64; // rows and columns that are turned at once
constexpr uint32_t kTileElements = kTile * kTile;

// Units of a block: of 16 bytes of the narrower dtype, tiles, single elements.
__host__ __device__ constexpr uint32_t units_per_block(int32_t path) {
  return path == kTurned ? 8 : path == kScattered ? 16384 : 4096;
}

__host__ __device__ constexpr uint32_t tiles(uint32_t extent) {
  return extent / kTile + (extent % kTile != 0);
}

// Words of 16 bytes that a row of the destination can touch, wherever it begins.
__host__ __device__ constexpr uint32_t slots(uint32_t length, uint32_t count) {
  return (length + 2 * (count - 1)) / count;
}

struct Place {
  const char* source;
  char* target;
  uint64_t number;
};

// In integers: there may be no destination, and nothing is added to a null pointer.
template <typename T>
__device__ __forceinline__ T* moved(T* pointer, int64_t num_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(num_bytes));
}

template <class W>
__device__ __forceinline__ void step(Place& place, const Piece& p, int dim, uint32_t count) {
  place.source = moved(place.source, int64_t{count} * p.source_strides[dim] * W::kFrom);
  place.target = moved(place.target, int64_t{count} * p.destination_strides[dim] * W::kTo);
  place.number += uint64_t{count} * static_cast<uint64_t>(p.global_strides[dim]);
}

__device__ __forceinline__ uint32_t divide(uint32_t value, uint32_t divisor, uint32_t& rest) {
  const uint32_t quotient = value < divisor ? 0 : value / divisor;
  rest = value - quotient * divisor;
  return quotient;
}

// Where a row begins, counted over the dims before `inner`.
template <class W>
__device__ __forceinline__ Place place_of_row(const Piece& p, uint32_t row, int inner) {
  Place place{p.source, p.destination, p.number};
#pragma unroll
  for (int dim = kLast - 1; dim >= 0; --dim) {
    if (row == 0) {
      break;
    }
    if (dim < inner) {
      uint32_t at;
      row = divide(row, static_cast<uint32_t>(p.shape[dim]), at);
      step<W>(place, p, dim, at);
    }
  }
  return place;
}

// Where group `index` of a piece lies, counted along the last dim first.
template <class W, int kCount>
__device__ __forceinline__ Place place_of(const Piece& p, uint32_t index) {
  uint32_t at;
  const uint32_t row = divide(index, static_cast<uint32_t>(p.shape[kLast]) / kCount, at);
  Place place = place_of_row<W>(p, row, kLast);
  step<W>(place, p, kLast, at * kCount);
  return place;
}

template <class W, int kCount, bool kHashed>
__device__ __forceinline__ uint64_t finish(const Entry& e, const Group<W::kFrom, kCount>& read, const Place& place) {
  const Group<W::kTo, kCount> written = convert<W>(read, e.pair);
  if (e.piece.destination != nullptr) {
    written.store(place.target);
  }
  return kHashed ? hash_group(written, e.piece, place.number) : 0;
}

// kAligned and kScattered. kCount: elements that a thread moves at once.
template <class W, int kCount, bool kHashed>
__device__ __forceinline__ uint64_t copy_groups(const Entry& e, uint32_t begin, uint32_t end) {
  // Loads of a thread that are under way together; what is hashed has registers for fewer.
  constexpr int kUnroll = kCount * W::kFrom <= 16 && !(kHashed && kCount > 1) ? 4 : 2;
  uint64_t sum = 0;
  for (uint32_t first = begin + threadIdx.x; first < end; first += kThreads * kUnroll) {
    Place places[kUnroll];
    Group<W::kFrom, kCount> read[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < end) {
        places[k] = place_of<W, kCount>(e.piece, first + k * kThreads);
        read[k].load(places[k].source);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < end) {
        sum += finish<W, kCount, kHashed>(e, read[k], places[k]);
      }
    }
  }
  return sum;
}

// kShifted. The words of 16 bytes of the destination (of the source where nothing is written) are filled one per thread;
// those at the ends of a row, or that need a word of the source which lies outside of the row in part, by elements.
template <class W, bool kHashed>
__device__ __forceinline__ uint64_t copy_shifted(const Entry& e, uint32_t begin, uint32_t end) {
  constexpr uint32_t kCount = W::kCount;
  const Piece& p = e.piece;
  const uint32_t length = static_cast<uint32_t>(p.shape[kLast]), slots_of_row = slots(length, kCount);
  uint64_t sum = 0;
  for (uint32_t unit = begin + threadIdx.x; unit < end; unit += kThreads) {
    uint32_t slot;
    Place place = place_of_row<W>(p, divide(unit, slots_of_row, slot), kLast);
    const uint32_t offset = p.destination != nullptr
        ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(place.target)) % (kCount * W::kTo) / W::kTo
        : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(place.source)) % (kCount * W::kFrom) / W::kFrom;
    const uint32_t low = slot == 0 ? 0 : slot * kCount - offset;
    const uint32_t high = min((slot + 1) * kCount - offset, length);
    if (low >= high) {
      continue;
    }
    const char* const row = place.source;
    step<W>(place, p, kLast, low);
    const char* const words = place.source - reinterpret_cast<uintptr_t>(place.source) % 16;
    constexpr int kSpan = kCount * W::kFrom;
    constexpr uint32_t kEdge = 4; // elements that are under way together
    const int64_t span = words == place.source ? kSpan : kSpan + 16;
    if (high - low == kCount && words >= row && words + span <= row + int64_t{length} * W::kFrom) {
      Group<W::kFrom, kCount> read;
      read.load_shifted(place.source);
      sum += finish<W, kCount, kHashed>(e, read, place);
    } else {
#pragma unroll 1
      for (uint32_t at = low; at < high; at += kEdge) {
        Group<W::kFrom, 1> read[kEdge];
#pragma unroll
        for (uint32_t k = 0; k < kEdge; ++k) {
          if (at + k < high) {
            read[k].load(place.source + k * W::kFrom);
          }
        }
#pragma unroll
        for (uint32_t k = 0; k < kEdge; ++k) {
          if (at + k < high) {
            sum += finish<W, 1, kHashed>(e, read[k], place);
            step<W>(place, p, kLast, 1);
          }
        }
      }
    }
  }
  return sum;
}

// A tile on its way from lines of the source to lines of the destination. The lines of the source lie one word of 4
// bytes further apart than they are long, so that neither side meets in one bank of shared memory more than twice.
template <int kSize>
struct Tile {
  static constexpr uint32_t kPitch = kTile + 4 / kSize; // elements
  using Type = typename Unsigned<kSize>::Type;
  uint32_t words[kTile * kPitch * kSize / 4];

  template <int kCount>
  __device__ __forceinline__ void put(uint32_t line, uint32_t at, const Group<kSize, kCount>& group) {
    if constexpr (kCount == 1) {
      reinterpret_cast<Type*>(words)[line * kPitch + at] = static_cast<Type>(group.words[0]);
    } else {
#pragma unroll
      for (int i = 0; i < group.kWords; ++i) {
        words[(line * kPitch + at) * kSize / 4 + i] = group.words[i];
      }
    }
  }

  // kCount elements of neighbouring lines.
  template <int kCount>
  __device__ __forceinline__ Group<kSize, kCount> get(uint32_t line, uint32_t at) const {
    Group<kSize, kCount> group;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      group.put(i, reinterpret_cast<const Type*>(words)[(line + i) * kPitch + at]);
    }
    return group;
  }
};

// The source into the tile: `height` elements of each of `width` lines, kCount at a time.
template <class W, int kCount>
__device__ __forceinline__ void fill_tile(
    Tile<W::kTo>& tile, const Entry& e, const Place& corner, uint32_t height, uint32_t width) {
  constexpr uint32_t kPerLine = kTile / kCount, kTurns = kTileElements / kCount / kThreads;
  constexpr uint32_t kUnroll = kTurns < 4 ? kTurns : 4;
  const int64_t stride = e.piece.source_strides[kLast];
#pragma unroll 1
  for (uint32_t turn = 0; turn < kTurns; turn += kUnroll) {
    Group<W::kFrom, kCount> read[kUnroll];
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const uint32_t unit = (turn + k) * kThreads + threadIdx.x, line = unit / kPerLine, at = unit % kPerLine * kCount;
      if (line < width && at < height) {
        read[k].load(corner.source + (line * stride + at) * W::kFrom);
      }
    }
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const uint32_t unit = (turn + k) * kThreads + threadIdx.x, line = unit / kPerLine, at = unit % kPerLine * kCount;
      if (line < width && at < height) {
        tile.put(line, at, convert<W>(read[k], e.pair));
      }
    }
  }
}

// The tile into the destination: `width` elements of each of `height` lines, kCount at a time.
template <class W, int kCount, bool kHashed>
__device__ __forceinline__ uint64_t empty_tile(
    const Tile<W::kTo>& tile, const Entry& e, const Place& corner, uint32_t height, uint32_t width) {
  constexpr uint32_t kPerLine = kTile / kCount;
  uint64_t sum = 0;
#pragma unroll 1
  for (uint32_t unit = threadIdx.x; unit < kTileElements / kCount; unit += kThreads) {
    const uint32_t line = unit / kPerLine, at = unit % kPerLine * kCount;
    if (line < height && at < width) {
      const auto group = tile.template get<kCount>(at, line);
      Place place = corner;
      step<W>(place, e.piece, kLast - 1, line);
      step<W>(place, e.piece, kLast, at);
      group.store(place.target);
      sum += kHashed ? hash_group(group, e.piece, place.number) : 0;
    }
  }
  return sum;
}

// kTurned: the source runs through along the last dim but one, the destination along the last.
template <class W, bool kHashed>
__device__ __forceinline__ uint64_t copy_turned(const Entry& e, uint32_t begin, uint32_t end) {
  __shared__ Tile<W::kTo> tile;
  constexpr uint32_t kWideFrom = 16 / W::kFrom, kWideTo = 16 / W::kTo;
  const Piece& p = e.piece;
  const uint32_t rows = static_cast<uint32_t>(p.shape[kLast - 1]), columns = static_cast<uint32_t>(p.shape[kLast]);
  uint64_t sum = 0;
  for (uint32_t unit = begin; unit < end; ++unit) {
    uint32_t left, top;
    const uint32_t outer = divide(divide(unit, tiles(columns), left), tiles(rows), top);
    left *= kTile;
    top *= kTile;
    Place corner = place_of_row<W>(p, outer, kLast - 1);
    step<W>(corner, p, kLast - 1, top);
    step<W>(corner, p, kLast, left);
    const uint32_t height = min(kTile, rows - top), width = min(kTile, columns - left);
    if (e.wide_source && height % kWideFrom == 0) {
      fill_tile<W, kWideFrom>(tile, e, corner, height, width);
    } else {
      fill_tile<W, 1>(tile, e, corner, height, width);
    }
    __syncthreads();
    if (e.wide_target && width % kWideTo == 0) {
      sum += empty_tile<W, kWideTo, kHashed>(tile, e, corner, height, width);
    } else {
      sum += empty_tile<W, 1, kHashed>(tile, e, corner, height, width);
    }
    __syncthreads(); // the next tile takes its place
  }
  return sum;
}

template <class W, int kPath, bool kHashed>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) strided_copy_kernel(
    const Entry* __restrict__ entries, const int64_t* __restrict__ first_blocks, int num_entries, unsigned long long* hashes) {
  __shared__ Entry entry;
  int low = 0, high = num_entries; // the last entry whose first block is not after this one
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_blocks[middle] <= blockIdx.x ? low : high) = middle;
  }
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(entries + low);
  if (threadIdx.x < sizeof(Entry) / 4) {
    reinterpret_cast<uint32_t*>(&entry)[threadIdx.x] = words[threadIdx.x];
  }
  __syncthreads();
  const uint32_t begin = static_cast<uint32_t>(blockIdx.x - first_blocks[low]) * units_per_block(kPath);
  const uint32_t end = min(begin + units_per_block(kPath), entry.num_units);
  uint64_t sum = 0;
  if constexpr (kPath == kAligned) {
    sum = copy_groups<W, W::kCount, kHashed>(entry, begin, end);
  } else if constexpr (kPath == kShifted) {
    sum = copy_shifted<W, kHashed>(entry, begin, end);
  } else if constexpr (kPath == kTurned) {
    sum = copy_turned<W, kHashed>(entry, begin, end);
  } else {
    sum = copy_groups<W, 1, kHashed>(entry, begin, end);
  }
  if constexpr (kHashed) {
    __shared__ unsigned long long sums[kWarps];
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
    }
    if (threadIdx.x % 32 == 0) {
      sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long total = 0;
      for (const unsigned long long part : sums) {
        total += part;
      }
      atomicAdd(hashes + entry.piece.slot, total);
    }
  }
}

// ------------------------------------------------------------------------------------------------------- the host

static_assert(sizeof(Entry) % 8 == 0 && sizeof(Entry) / 4 <= kThreads);

using Kernel = void (*)(const Entry*, const int64_t*, int, unsigned long long*);

template <class W, bool kHashed>
Kernel kernel_of(int32_t path) {
  switch (path) {
    case kAligned:
      return strided_copy_kernel<W, kAligned, kHashed>;
    case kShifted:
      return strided_copy_kernel<W, kShifted, kHashed>;
    case kTurned:
      return strided_copy_kernel<W, kTurned, kHashed>;
    default:
      return strided_copy_kernel<W, kScattered, kHashed>;
  }
}

template <bool kHashed>
Kernel kernel_of(int32_t width, int32_t path) {
  switch (width) {
    case 0:
      return kernel_of<Width<1, 1, false>, kHashed>(path);
    case 1:
      return kernel_of<Width<2, 2, false>, kHashed>(path);
    case 2:
      return kernel_of<Width<4, 4, false>, kHashed>(path);
    case 3:
      return kernel_of<Width<2, 2, true>, kHashed>(path);
    case 4:
      return kernel_of<Width<4, 2, true>, kHashed>(path);
    default:
      return kernel_of<Width<2, 4, true>, kHashed>(path);
  }
}

int32_t width_of(const Piece& p) {
  const int64_t from = size_of(p.source_type), to = size_of(p.destination_type);
  if (p.source_type == p.destination_type) {
    return from == 1 ? 0 : from == 2 ? 1 : 2;
  }
  return from == to ? 3 : from == 4 ? 4 : 5;
}

uint32_t count_of(const Piece& p) {
  return static_cast<uint32_t>(16 / std::min(size_of(p.source_type), size_of(p.destination_type)));
}

// Whether an address stays a multiple of 16 along all dims but `run`.
bool is_wide(const char* address, const int64_t* strides, const Piece& p, int64_t size, int run) {
  int64_t rest = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
  for (int dim = 0; dim < kDims; ++dim) {
    rest |= dim != run && p.shape[dim] > 1 ? strides[dim] * size : 0;
  }
  return rest % 16 == 0;
}

// Decides on the path of a piece, and brings its dims into the order that this wants.
Path path_of(Entry& e) {
  Piece& p = e.piece;
  const int64_t from = size_of(p.source_type), to = size_of(p.destination_type), count = count_of(p);
  if (p.is_run()) {
    const bool wide = is_wide(p.source, p.source_strides, p, from, kLast) &&
        (p.destination == nullptr || is_wide(p.destination, p.destination_strides, p, to, kLast));
    return wide && p.shape[kLast] % count == 0 ? kAligned : p.shape[kLast] >= 4 * count ? kShifted : kScattered;
  }
  if (p.destination == nullptr || p.destination_strides[kLast] != 1 || p.shape[kLast] < 8) {
    return kScattered;
  }
  for (int dim = 0; dim < kLast; ++dim) {
    if (p.source_strides[dim] == 1 && p.shape[dim] >= 8) {
      detail::swap_dims(p, dim, kLast - 1);
      e.wide_source = is_wide(p.source, p.source_strides, p, from, kLast - 1);
      e.wide_target = is_wide(p.destination, p.destination_strides, p, to, kLast);
      return kTurned;
    }
  }
  return kScattered;
}

int64_t num_units(const Piece& p, Path path) {
  const int64_t count = count_of(p), length = p.shape[kLast], rows = p.num_elements / length;
  if (path == kShifted) {
    return rows * slots(static_cast<uint32_t>(length), static_cast<uint32_t>(count));
  }
  if (path == kTurned) {
    return rows / p.shape[kLast - 1] * tiles(static_cast<uint32_t>(p.shape[kLast - 1])) * tiles(static_cast<uint32_t>(length));
  }
  return path == kAligned ? p.num_elements / count : p.num_elements;
}

// Cuts pieces of more elements than `most` in two along their longest dim, where a tile ends if it is long enough.
void cut(const Piece& p, int64_t most, std::vector<Piece>& pieces) {
  const auto longest = static_cast<int>(std::max_element(p.shape, p.shape + kDims) - p.shape);
  const int64_t extent = p.shape[longest];
  if (p.num_elements <= most || extent == 1) {
    pieces.push_back(p);
    return;
  }
  const int64_t first = extent >= 2 * kTile ? extent / 2 / kTile * kTile : extent / 2;
  Piece low = p, high = p;
  low.shape[longest] = first;
  low.num_elements = p.num_elements / extent * first;
  high.shape[longest] = extent - first;
  high.num_elements = p.num_elements - low.num_elements;
  high.source += first * p.source_strides[longest] * size_of(p.source_type);
  high.number += static_cast<uint64_t>(first * p.global_strides[longest]);
  if (p.destination != nullptr) {
    high.destination += first * p.destination_strides[longest] * size_of(p.destination_type);
  }
  cut(low, most, pieces);
  cut(high, most, pieces);
}

} // namespace

Batch::Batch(const int64_t* table, int64_t num_rows, bool hashed, int64_t most_units) : hashed_(hashed) {
  std::vector<Entry> sorted[kNumWidths * kNumPaths];
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_rows; ++i) {
    const Piece whole = normal_form(table + i * kNumColumns, hashed);
    if (whole.num_elements == 0) {
      continue;
    }
    pieces.clear();
    cut(whole, most_units, pieces); // no path has more units than elements
    for (const Piece& piece : pieces) {
      Entry e{piece, pair_of(piece.source_type, piece.destination_type), 0, false, false};
      const Path path = path_of(e);
      e.num_units = static_cast<uint32_t>(num_units(e.piece, path));
      sorted[width_of(piece) * kNumPaths + path].push_back(e);
      ++num_entries_;
    }
  }
  upload_.resize(num_entries_ * (sizeof(Entry) + sizeof(int64_t)));
  char* const first_blocks = upload_.data() + num_entries_ * sizeof(Entry);
  int64_t at = 0;
  for (int32_t i = 0; i < kNumWidths * kNumPaths; ++i) {
    if (sorted[i].empty()) {
      continue;
    }
    Run run{i / kNumPaths, i % kNumPaths, at, static_cast<int64_t>(sorted[i].size()), 0};
    for (const Entry& e : sorted[i]) {
      std::memcpy(upload_.data() + at * sizeof(Entry), &e, sizeof(Entry));
      std::memcpy(first_blocks + at * sizeof(int64_t), &run.num_blocks, sizeof(int64_t));
      run.num_blocks += (int64_t{e.num_units} + units_per_block(run.path) - 1) / units_per_block(run.path);
      ++at;
    }
    runs_.push_back(run);
  }
}

int64_t Batch::most_blocks() const {
  int64_t most = 0;
  for (const Run& run : runs_) {
    most = std::max(most, run.num_blocks);
  }
  return most;
}

cudaError_t Batch::launch(void* memory, unsigned long long* hashes, cudaStream_t stream) const {
  // From pageable memory: the call returns when the data has been taken.
  cudaError_t error = cudaMemcpyAsync(memory, upload_.data(), upload_.size(), cudaMemcpyHostToDevice, stream);
  const auto* entries = static_cast<const Entry*>(memory);
  const auto* first_blocks = reinterpret_cast<const int64_t*>(entries + num_entries_);
  for (const Run& run : runs_) {
    if (error != cudaSuccess) {
      return error;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(run.num_blocks));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    const Kernel kernel = hashed_ ? kernel_of<true>(run.width, run.path) : kernel_of<false>(run.width, run.path);
    error = cudaLaunchKernelEx(
        &config, kernel, entries + run.first, first_blocks + run.first, static_cast<int>(run.count), hashes);
  }
  return error;
}

} // namespace hybrid_rl::strided
