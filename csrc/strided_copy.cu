// Batched copy-and-cast of strided pieces on CUDA, with the content hash of what is written: one launch per bucket.
//
// Every block takes a chunk of kChunk elements of one piece, which it finds in the prefix sum of the pieces' chunks. Where
// both sides run through and are aligned, a thread moves 16 bytes at a time (of the narrower dtype); elsewhere single
// elements, neighbours in the destination by neighbouring threads.

#include "strided_copy.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace {

using namespace hybrid_rl::strided;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int64_t kChunk = 32768; // elements of a block
constexpr int kUnroll = 4; // loads of a thread that are under way together
constexpr int kLast = kDims - 1;

struct Entry {
  Piece piece;
  bool aligned; // 16 bytes at a time
};

// ---------------------------------------------------------------------------------------------- elements, as bits

// A NaN that is converted becomes the canonical one of its new dtype, as on the CPU.
template <int32_t kFrom>
__device__ __forceinline__ float to_float(uint32_t bits) {
  if constexpr (kFrom == kFloat) {
    return __uint_as_float(bits);
  } else if constexpr (kFrom == kBFloat16) {
    return __uint_as_float(bits << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
}

template <int32_t kFrom, int32_t kTo>
__device__ __forceinline__ uint32_t convert(uint32_t bits) {
  if constexpr (kFrom == kTo) {
    return bits;
  } else {
    const float value = to_float<kFrom>(bits);
    const bool is_nan = value != value;
    if constexpr (kTo == kFloat) {
      return is_nan ? 0x7FC00000u : __float_as_uint(value);
    } else if constexpr (kTo == kBFloat16) {
      return is_nan ? 0x7FC0u : __bfloat16_as_ushort(__float2bfloat16_rn(value));
    } else {
      return is_nan ? 0x7E00u : __half_as_ushort(__float2half_rn(value));
    }
  }
}

template <int kSize>
struct Unsigned;
template <>
struct Unsigned<1> {
  using Type = uint8_t;
};
template <>
struct Unsigned<2> {
  using Type = uint16_t;
};
template <>
struct Unsigned<4> {
  using Type = uint32_t;
};

// kCount neighbouring elements of kSize bytes in registers.
template <int kSize, int kCount>
struct Group {
  static constexpr int kBytes = kSize * kCount;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const char* source) {
    if constexpr (kCount == 1) {
      words[0] = __ldcs(reinterpret_cast<const typename Unsigned<kSize>::Type*>(source));
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 four = __ldcs(reinterpret_cast<const uint4*>(source) + i);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    }
  }

  __device__ __forceinline__ void store(char* target) const {
    if constexpr (kCount == 1) {
      using Type = typename Unsigned<kSize>::Type;
      __stcs(reinterpret_cast<Type*>(target), static_cast<Type>(words[0]));
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        __stcs(
            reinterpret_cast<uint4*>(target) + i,
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
      }
    }
  }

  __device__ __forceinline__ uint32_t get(int i) const {
    constexpr int kPerWord = 4 / kSize;
    return kSize == 4 ? words[i] : (words[i / kPerWord] >> (i % kPerWord * 8 * kSize)) & ((1u << (8 * kSize % 32)) - 1);
  }

  __device__ __forceinline__ void put(int i, uint32_t bits) {
    constexpr int kPerWord = 4 / kSize;
    words[i / kPerWord] = i % kPerWord == 0 ? bits : words[i / kPerWord] | bits << (i % kPerWord * 8 * kSize);
  }
};

// ------------------------------------------------------------------------------------------------------ a chunk

struct Place {
  const char* source;
  char* target;
  uint64_t number;
};

__device__ __forceinline__ uint64_t divide(uint64_t value, uint64_t divisor, uint64_t& rest) {
  if (value < divisor) {
    rest = value;
    return 0;
  }
  if ((value | divisor) >> 32 == 0) {
    const uint32_t small = static_cast<uint32_t>(value), by = static_cast<uint32_t>(divisor);
    rest = small % by;
    return small / by;
  }
  rest = value % divisor;
  return value / divisor;
}

// Where group `index` of a piece lies, counted along the last dim first.
template <int kFromSize, int kToSize, int kCount>
__device__ __forceinline__ Place place_of(const Piece& p, uint64_t index) {
  Place place{p.source, p.destination, p.number};
  uint64_t at;
  uint64_t row = divide(index, p.shape[kLast] / kCount, at);
  at *= kCount;
#pragma unroll
  for (int dim = kLast; dim >= 0; --dim) {
    place.source += static_cast<int64_t>(at) * p.source_strides[dim] * kFromSize;
    place.target += static_cast<int64_t>(at) * p.destination_strides[dim] * kToSize;
    place.number += at * static_cast<uint64_t>(p.global_strides[dim]);
    if (row == 0) {
      break;
    }
    row = divide(row, p.shape[dim - 1], at);
  }
  return place;
}

template <int32_t kTo, int kCount>
__device__ __forceinline__ uint64_t hash_group(const Group<size_of(kTo), kCount>& group, const Piece& p, uint64_t number) {
  const uint64_t stride = static_cast<uint64_t>(p.global_strides[kLast]);
  const uint32_t upper = static_cast<uint32_t>(number >> 32);
  const Seeds seeds = seeds_of(p.seed, upper);
  const bool alike = upper == static_cast<uint32_t>((number + (kCount - 1) * stride) >> 32);
  const uint32_t weyl = static_cast<uint32_t>(number) * kWeyl + seeds.first, step = static_cast<uint32_t>(stride) * kWeyl;
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum += alike ? term_of(group.get(i), key_of(weyl + i * step, seeds.second))
                 : hash_of(group.get(i), p.seed, number + i * stride);
  }
  return sum;
}

// kCount: elements that a thread moves at once.
template <int32_t kFrom, int32_t kTo, int kCount, bool kHashed>
__device__ __forceinline__ uint64_t copy_chunk(const Piece& p, int64_t chunk) {
  constexpr int kFromSize = size_of(kFrom), kToSize = size_of(kTo);
  const int64_t begin = chunk * (kChunk / kCount);
  const int64_t end = min(begin + kChunk / kCount, p.num_elements / kCount);
  uint64_t sum = 0;
  for (int64_t first = begin + threadIdx.x; first < end; first += kThreads * kUnroll) {
    Place places[kUnroll];
    Group<kFromSize, kCount> read[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < end) {
        places[k] = place_of<kFromSize, kToSize, kCount>(p, first + k * kThreads);
        read[k].load(places[k].source);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < end) {
        Group<kToSize, kCount> written;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          written.put(i, convert<kFrom, kTo>(read[k].get(i)));
        }
        if (p.destination != nullptr) {
          written.store(places[k].target);
        }
        if constexpr (kHashed) {
          sum += hash_group<kTo, kCount>(written, p, places[k].number);
        }
      }
    }
  }
  return sum;
}

HYBRID_RL_SHARED constexpr int wide(int32_t from, int32_t to) {
  return static_cast<int>(16 / (size_of(from) < size_of(to) ? size_of(from) : size_of(to)));
}

template <int32_t kFrom, int32_t kTo, bool kHashed>
__device__ __forceinline__ uint64_t copy_as(const Entry& entry, int64_t chunk) {
  return entry.aligned ? copy_chunk<kFrom, kTo, wide(kFrom, kTo), kHashed>(entry.piece, chunk)
                       : copy_chunk<kFrom, kTo, 1, kHashed>(entry.piece, chunk);
}

template <bool kHashed>
__global__ void __launch_bounds__(kThreads) strided_copy_kernel(
    const Entry* __restrict__ entries, const int64_t* __restrict__ first_chunks, int num_entries, unsigned long long* hashes) {
  const int64_t chunk = blockIdx.x;
  int low = 0, high = num_entries; // the last entry whose first chunk is not after this one
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_chunks[middle] <= chunk ? low : high) = middle;
  }
  const Entry& entry = entries[low];
  const int64_t at = chunk - first_chunks[low];
  uint64_t sum = 0;
  switch (pair_of(entry.piece.source_type, entry.piece.destination_type)) {
    case 1:
      sum = copy_as<kBytes1, kBytes1, kHashed>(entry, at);
      break;
    case 2:
      sum = copy_as<kBytes2, kBytes2, kHashed>(entry, at);
      break;
    case 4:
      sum = copy_as<kBytes4, kBytes4, kHashed>(entry, at);
      break;
    case pair_of(kFloat, kBFloat16):
      sum = copy_as<kFloat, kBFloat16, kHashed>(entry, at);
      break;
    case pair_of(kFloat, kHalf):
      sum = copy_as<kFloat, kHalf, kHashed>(entry, at);
      break;
    case pair_of(kBFloat16, kFloat):
      sum = copy_as<kBFloat16, kFloat, kHashed>(entry, at);
      break;
    case pair_of(kBFloat16, kHalf):
      sum = copy_as<kBFloat16, kHalf, kHashed>(entry, at);
      break;
    case pair_of(kHalf, kFloat):
      sum = copy_as<kHalf, kFloat, kHashed>(entry, at);
      break;
    default:
      sum = copy_as<kHalf, kBFloat16, kHashed>(entry, at);
      break;
  }
  if constexpr (kHashed) {
    __shared__ unsigned long long sums[kThreads / 32];
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

bool is_aligned(const Piece& p) {
  const int64_t from = size_of(p.source_type), to = size_of(p.destination_type);
  if (!p.is_run() || p.shape[kLast] % wide(p.source_type, p.destination_type) != 0) {
    return false;
  }
  int64_t rest = reinterpret_cast<int64_t>(p.source) | reinterpret_cast<int64_t>(p.destination);
  for (int dim = 0; dim < kLast; ++dim) {
    if (p.shape[dim] > 1) {
      rest |= p.source_strides[dim] * from;
      rest |= p.destination == nullptr ? 0 : p.destination_strides[dim] * to;
    }
  }
  return rest % 16 == 0;
}

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "hybrid_rl::strided_copy: ", what, " failed: ", cudaGetErrorString(error));
}

void launch(const std::vector<Entry>& entries, const std::vector<int64_t>& first_chunks, int64_t num_chunks, const Tensor& hashes) {
  const int device = hashes.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* current = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  const cudaStream_t stream = static_cast<cudaStream_t>(current);
  // The allocator gives this memory to later work of the stream only, so it may be let go of before the kernel has run.
  const size_t entry_bytes = entries.size() * sizeof(Entry), chunk_bytes = first_chunks.size() * sizeof(int64_t);
  const int64_t num_words = static_cast<int64_t>((entry_bytes + chunk_bytes) / sizeof(int64_t));
  const Tensor memory = torch::stable::new_empty(hashes, {&num_words, 1}, ScalarType::Long);
  char* const table = static_cast<char*>(memory.mutable_data_ptr());
  // From pageable memory: the call returns when the data has been taken.
  check_cuda(cudaMemcpyAsync(table, entries.data(), entry_bytes, cudaMemcpyHostToDevice, stream), "copying the table");
  check_cuda(
      cudaMemcpyAsync(table + entry_bytes, first_chunks.data(), chunk_bytes, cudaMemcpyHostToDevice, stream),
      "copying the table");
  const Entry* entry = reinterpret_cast<const Entry*>(table);
  const int64_t* chunk = reinterpret_cast<const int64_t*>(table + entry_bytes);
  auto* sums = static_cast<unsigned long long*>(hashes.mutable_data_ptr());
  const unsigned blocks = static_cast<unsigned>(num_chunks);
  const int count = static_cast<int>(entries.size());
  if (hashes.size(0) > 0) {
    strided_copy_kernel<true><<<blocks, kThreads, 0, stream>>>(entry, chunk, count, sums);
  } else {
    strided_copy_kernel<false><<<blocks, kThreads, 0, stream>>>(entry, chunk, count, sums);
  }
  check_cuda(cudaGetLastError(), "the launch");
}

// table on the CPU, hashes on the device, [0] for none. Addresses are the caller's word.
void strided_copy(const Tensor& table, const Tensor& hashes) {
  STD_TORCH_CHECK(
      table.is_cpu() && table.dim() == 2 && table.size(1) == kNumColumns && table.scalar_type() == ScalarType::Long &&
          table.is_contiguous(),
      "hybrid_rl::strided_copy: table must be contiguous int64 [P, ", kNumColumns, "] on the CPU");
  STD_TORCH_CHECK(
      hashes.is_cuda() && hashes.dim() == 1 && hashes.scalar_type() == ScalarType::Long && hashes.is_contiguous(),
      "hybrid_rl::strided_copy: hashes must be contiguous int64 on the device, one-dimensional");
  const int64_t* row = static_cast<const int64_t*>(table.const_data_ptr());
  std::vector<Entry> entries;
  std::vector<int64_t> first_chunks;
  int64_t num_chunks = 0;
  for (int64_t i = 0; i < table.size(0); ++i, row += kNumColumns) {
    const Piece piece = normal_form(row, hashes.size(0) > 0);
    if (piece.num_elements == 0) {
      continue;
    }
    entries.push_back({piece, is_aligned(piece)});
    first_chunks.push_back(num_chunks);
    num_chunks += (piece.num_elements + kChunk - 1) / kChunk;
  }
  if (!entries.empty()) {
    STD_TORCH_CHECK(num_chunks < (int64_t{1} << 31), "hybrid_rl::strided_copy: one call takes at most 2^46 elements");
    launch(entries, first_chunks, num_chunks, hashes);
  }
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CUDA, library) {
  library.impl("strided_copy", TORCH_BOX(&strided_copy));
}
