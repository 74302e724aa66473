// Memory of a GPU at an address that stays: a range of addresses is reserved once, and physical memory is mapped into it,
// taken out and mapped again, by CUDA's driver API for virtual memory. Other processes map the same memory by file
// descriptors.
//
// A plain C interface, called by hybrid_rl/memory/cuda_driver.py. Every call returns 0, a positive CUresult, or one of
// the negative codes below, with a sentence in `message` (at most `room` bytes, its end included). A call that fails has
// changed nothing, or its sentence says what. Nothing here throws, ends the process, or calls Python.

#pragma once

#include <cstdint>

#define HYBRID_RL_EXPORT extern "C" __attribute__((visibility("default")))

enum HybridRlRegionCode : int32_t {
  kNoDriver = -1, // libcuda cannot be loaded, or lacks a function
  kNoSupport = -2, // the device has no virtual memory management, or no file handles
  kWrongState = -3, // asleep, closed, or broken
  kTooSmall = -4, // beyond the capacity, or the room that the caller gave
  kNoHostMemory = -5,
};

// kBroken: a call failed and so did undoing it. Everything that is still there is on the books; only close helps.
enum HybridRlRegionState : int32_t { kAwake, kAsleep, kClosed, kBroken };

struct HybridRlRegion; // counted: its owner holds it, and every tensor over it

struct HybridRlRegionInfo {
  uint64_t address, capacity, granularity;
  uint64_t mapped; // bytes of physical memory
  int32_t state;
};

// Reserves `capacity` bytes of addresses, rounded up; maps nothing. driver: path or name of libcuda. chunk: the most bytes
// of one piece of physical memory.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_new(
    const char* driver, int32_t device, uint64_t capacity, uint64_t chunk, HybridRlRegion** made, char* message,
    uint64_t room);

// Has at least `bytes` bytes mapped from the beginning on; what is new is zero.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_grow(HybridRlRegion* region, uint64_t bytes, char* message, uint64_t room);

// Waits for the device and gives the physical memory back. The addresses stay reserved, and fault.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_sleep(HybridRlRegion* region, char* message, uint64_t room);

// Maps as much as before, zeros, at the same addresses. If it fails, everything is as it was, asleep.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_wake(HybridRlRegion* region, char* message, uint64_t room);

// A DLPack tensor (DLManagedTensor*) of `bytes` bytes of uint8 at an offset, which holds the region.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_tensor(
    HybridRlRegion* region, uint64_t offset, uint64_t bytes, int32_t device_type, int32_t device_id, void** made,
    char* message, uint64_t room);

// Drops a tensor that nobody took.
HYBRID_RL_EXPORT void hybrid_rl_region_drop_tensor(void* tensor);

// Gives the physical memory back for good; after a failure it may be called again. The addresses stay reserved until the
// last holder is gone.
HYBRID_RL_EXPORT int32_t hybrid_rl_region_close(HybridRlRegion* region, char* message, uint64_t room);

// Ends the owner's hold.
HYBRID_RL_EXPORT void hybrid_rl_region_drop(HybridRlRegion* region);

HYBRID_RL_EXPORT void hybrid_rl_region_info(HybridRlRegion* region, HybridRlRegionInfo* info);

namespace hybrid_rl::dlpack {

// What DLPack says a tensor is (dlpack.h, version 0.8): PyTorch takes this form.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

} // namespace hybrid_rl::dlpack
