// The part of CUDA's driver API that a region calls, declared here: it compiles without CUDA's headers, and libcuda is
// looked for when the first region is made, so that the library loads on machines without CUDA.
//
// tests/unit/memory/test_cuda_driver.py holds every size, offset, number and signature against cuda.h where there is one.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hybrid_rl::cuda {

using Result = int; // CUresult
using Device = int; // CUdevice
using Pointer = unsigned long long; // CUdeviceptr
using Handle = unsigned long long; // CUmemGenericAllocationHandle
using Context = struct CUctx_st*;

constexpr Result kSuccess = 0, kOutOfMemory = 2;
constexpr int kHasVirtualMemory = 102; // CUdevice_attribute
constexpr int kPinned = 1; // CUmemAllocationType
constexpr int kOnDevice = 1; // CUmemLocationType
constexpr int kReadWrite = 3; // CUmemAccess_flags
constexpr int kRecommended = 1; // CUmemAllocationGranularity_flags

struct Location {
  int type, id;
};

struct Properties { // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void* win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct Access { // CUmemAccessDesc
  Location location;
  int flags;
};

// Names as libcuda exports them, and arguments.
#define HYBRID_RL_CUDA_FUNCTIONS(F) \
  F(cuInit, unsigned) \
  F(cuDeviceGet, Device*, int) \
  F(cuDeviceGetAttribute, int*, int, Device) \
  F(cuDevicePrimaryCtxRetain, Context*, Device) \
  F(cuDevicePrimaryCtxRelease_v2, Device) \
  F(cuCtxPushCurrent_v2, Context) \
  F(cuCtxPopCurrent_v2, Context*) \
  F(cuCtxSynchronize, void) \
  F(cuMemGetAllocationGranularity, size_t*, const Properties*, int) \
  F(cuMemAddressReserve, Pointer*, size_t, size_t, Pointer, unsigned long long) \
  F(cuMemAddressFree, Pointer, size_t) \
  F(cuMemCreate, Handle*, size_t, const Properties*, unsigned long long) \
  F(cuMemRelease, Handle) \
  F(cuMemMap, Pointer, size_t, size_t, Handle, unsigned long long) \
  F(cuMemUnmap, Pointer, size_t) \
  F(cuMemSetAccess, Pointer, size_t, const Access*, size_t) \
  F(cuMemsetD8_v2, Pointer, unsigned char, size_t) \
  F(cuGetErrorName, Result, const char**) \
  F(cuGetErrorString, Result, const char**)

struct Driver {
#define HYBRID_RL_POINTER(name, ...) Result (*name)(__VA_ARGS__);
  HYBRID_RL_CUDA_FUNCTIONS(HYBRID_RL_POINTER)
#undef HYBRID_RL_POINTER
};

} // namespace hybrid_rl::cuda
