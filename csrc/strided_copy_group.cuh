// Neighbouring elements in the registers of a thread: loaded, converted, hashed, stored.

#pragma once

#include "strided_copy.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_rl::strided {

constexpr int kLast = kDims - 1;

// A NaN that is converted becomes the canonical one of its new dtype, as on the CPU.
template <int32_t kFrom, int32_t kTo>
__device__ __forceinline__ uint32_t convert_bits(uint32_t bits) {
  float value;
  if constexpr (kFrom == kFloat) {
    value = __uint_as_float(bits);
  } else if constexpr (kFrom == kBFloat16) {
    value = __uint_as_float(bits << 16);
  } else {
    value = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  const bool is_nan = value != value;
  if constexpr (kTo == kFloat) {
    return is_nan ? 0x7FC00000u : __float_as_uint(value);
  } else if constexpr (kTo == kBFloat16) {
    return is_nan ? 0x7FC0u : __bfloat16_as_ushort(__float2bfloat16_rn(value));
  } else {
    return is_nan ? 0x7E00u : __half_as_ushort(__float2half_rn(value));
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

// kCount elements of kSize bytes: one, or a multiple of 16 bytes (of 8 on their way through shared memory).
template <int kSize, int kCount>
struct Group {
  using Type = typename Unsigned<kSize>::Type;
  static constexpr int kBytes = kSize * kCount;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  // Everything is read once and written once: neither needs to stay in a cache.
  __device__ __forceinline__ void load(const char* source) {
    if constexpr (kCount == 1) {
      words[0] = __ldcs(reinterpret_cast<const Type*>(source));
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

  // From an address between two words of 16 bytes: both are read, and the bytes moved into place. The word that two
  // neighbouring threads read is in the first-level cache for the second of them.
  __device__ __forceinline__ void load_shifted(const char* source) {
    const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(source)) & 15u;
    Group<4, kWords + 4> raw;
    raw.load_words(source - shift, shift != 0);
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) {
      raw.words[i] = shift & 8u ? raw.words[i + 2] : raw.words[i];
    }
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) {
      raw.words[i] = shift & 4u ? raw.words[i + 1] : raw.words[i];
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __funnelshift_r(raw.words[i], raw.words[i + 1], (shift & 3u) * 8);
    }
  }

  // The last 16 bytes only if asked for, else zeros.
  __device__ __forceinline__ void load_words(const char* source, bool last) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      uint4 four = make_uint4(0, 0, 0, 0);
      if (i + 1 < kBytes / 16 || last) {
        four = __ldcs(reinterpret_cast<const uint4*>(source) + i);
      }
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void store(char* target) const {
    if constexpr (kCount == 1) {
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

  // In ascending order, the first element of a word first.
  __device__ __forceinline__ void put(int i, uint32_t bits) {
    constexpr int kPerWord = 4 / kSize;
    words[i / kPerWord] = i % kPerWord == 0 ? bits : words[i / kPerWord] | bits << (i % kPerWord * 8 * kSize);
  }
};

// Sizes of the elements of a kernel; casts: whether they are converted, else they are plain bytes.
template <int kFromBytes, int kToBytes, bool kConverts>
struct Width {
  static constexpr int kFrom = kFromBytes, kTo = kToBytes;
  static constexpr bool kCasts = kConverts;
  static constexpr int kCount = 16 / (kFrom < kTo ? kFrom : kTo); // elements that a thread moves at once
};

template <int32_t kFrom, int32_t kTo, int kCount>
__device__ __forceinline__ void convert_group(
    const Group<size_of(kFrom), kCount>& read, Group<size_of(kTo), kCount>& written) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    written.put(i, convert_bits<kFrom, kTo>(read.get(i)));
  }
}

template <class W, int kCount>
__device__ __forceinline__ Group<W::kTo, kCount> convert(const Group<W::kFrom, kCount>& read, int32_t pair) {
  if constexpr (!W::kCasts) {
    return read;
  } else {
    Group<W::kTo, kCount> written;
    if constexpr (W::kFrom == 4) {
      if (pair == pair_of(kFloat, kHalf)) {
        convert_group<kFloat, kHalf>(read, written);
      } else {
        convert_group<kFloat, kBFloat16>(read, written);
      }
    } else if constexpr (W::kTo == 4) {
      if (pair == pair_of(kHalf, kFloat)) {
        convert_group<kHalf, kFloat>(read, written);
      } else {
        convert_group<kBFloat16, kFloat>(read, written);
      }
    } else if (pair == pair_of(kHalf, kBFloat16)) {
      convert_group<kHalf, kBFloat16>(read, written);
    } else {
      convert_group<kBFloat16, kHalf>(read, written);
    }
    return written;
  }
}

// number: of the first element.
template <int kSize, int kCount>
__device__ __forceinline__ uint64_t hash_group(const Group<kSize, kCount>& group, const Piece& p, uint64_t number) {
  const uint64_t stride = static_cast<uint64_t>(p.global_strides[kLast]);
  const uint32_t upper = static_cast<uint32_t>(number >> 32);
  uint64_t sum = 0;
  if (upper == static_cast<uint32_t>((number + (kCount - 1) * stride) >> 32)) {
    const Seeds seeds = seeds_of(p.seed, upper);
    const uint32_t step = static_cast<uint32_t>(stride) * kWeyl;
    uint32_t weyl = static_cast<uint32_t>(number) * kWeyl + seeds.first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum += term_of(group.get(i), key_of(weyl, seeds.second));
      weyl += step;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum += hash_of(group.get(i), p.seed, number + i * stride);
    }
  }
  return sum;
}

} // namespace hybrid_rl::strided
