// A stand-in of CUDA's driver for the calls of csrc/cuda_driver.h, over memory files: a reservation is an inaccessible
// mapping, and physical memory a memfd.
//
// It is stricter than it must be: whatever the real driver refuses or leaves undefined is refused here. The nth call of
// any function can be made to fail, memory is limited by a budget, and a ledger counts what is alive.

#include "../../../csrc/cuda_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using namespace hybrid_rl::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr Result kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101, kInvalidContext = 201;

struct Memory { // of one handle
  int fd;
  uint64_t size;
  int num_maps = 0;
  bool released = false;
};

struct Map {
  uint64_t size;
  Handle handle;
};

std::recursive_mutex mutex;
bool initialized = false;
int num_devices = 2;
uint64_t granularity = 4096, budget = UINT64_MAX, used = 0;
int has_virtual_memory = 1;
long retained = 0;
std::map<Pointer, uint64_t> reservations;
std::map<Pointer, Map> maps;
std::map<Handle, Memory> memories;
Handle next_handle = 1;
thread_local std::vector<Context> contexts;
std::map<std::string, long> calls;
std::map<std::string, std::map<long, Result>> faults; // by function, by number of the call from now on
std::string log_; // functions in the order of their calls

Result counted(const char* name) {
  log_ += name;
  log_ += '\n';
  const long number = ++calls[name];
  auto& planned = faults[name];
  if (const auto found = planned.find(number); found != planned.end()) {
    const Result result = found->second;
    planned.erase(found);
    return result;
  }
  return initialized || std::strcmp(name, "cuInit") == 0 ? kSuccess : kNotInitialized;
}

#define BEGIN(name) \
  const std::lock_guard<std::recursive_mutex> lock(mutex); \
  if (const Result planned = counted(name); planned != kSuccess) return planned
#define REQUIRE(condition) \
  if (!(condition)) return kInvalidValue

bool aligned(uint64_t number) {
  return number != 0 && number % granularity == 0;
}

bool reserved(Pointer place, uint64_t size) {
  auto after = reservations.upper_bound(place);
  if (after == reservations.begin()) return false;
  --after;
  return place >= after->first && place + size <= after->first + after->second;
}

bool overlaps(Pointer place, uint64_t size) {
  for (const auto& [start, map] : maps) {
    if (place < start + map.size && start < place + size) return true;
  }
  return false;
}

void forget_if_unused(Handle handle) {
  Memory& memory = memories.at(handle);
  if (memory.released && memory.num_maps == 0) {
    close(memory.fd);
    used -= memory.size;
    memories.erase(handle);
  }
}

bool is_mapped(Pointer place, uint64_t size) { // in whole, perhaps by several maps
  uint64_t have = 0;
  for (const auto& [start, map] : maps) {
    if (start >= place && start + map.size <= place + size) have += map.size;
  }
  return have == size;
}

} // namespace

EXPORT Result cuInit(unsigned flags) {
  BEGIN("cuInit");
  REQUIRE(flags == 0);
  initialized = true;
  return kSuccess;
}

EXPORT Result cuDeviceGet(Device* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (ordinal < 0 || ordinal >= num_devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  BEGIN("cuDeviceGetAttribute");
  REQUIRE(attribute == kHasVirtualMemory);
  *value = has_virtual_memory;
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  *context = reinterpret_cast<Context>(static_cast<uintptr_t>(4096 + device));
  ++retained;
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRelease_v2(Device) {
  BEGIN("cuDevicePrimaryCtxRelease_v2");
  REQUIRE(retained > 0);
  --retained;
  return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(Context context) {
  BEGIN("cuCtxPushCurrent_v2");
  REQUIRE(context != nullptr);
  contexts.push_back(context);
  return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  BEGIN("cuCtxPopCurrent_v2");
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

EXPORT Result cuCtxSynchronize() {
  BEGIN("cuCtxSynchronize");
  return contexts.empty() ? kInvalidContext : kSuccess;
}

EXPORT Result cuMemGetAllocationGranularity(size_t* size, const Properties* properties, int) {
  BEGIN("cuMemGetAllocationGranularity");
  REQUIRE(properties->type == kPinned && properties->location.type == kOnDevice);
  *size = granularity;
  return kSuccess;
}

EXPORT Result cuMemAddressReserve(Pointer* place, size_t size, size_t alignment, Pointer wanted, unsigned long long flags) {
  BEGIN("cuMemAddressReserve");
  REQUIRE(aligned(size) && alignment == 0 && wanted == 0 && flags == 0);
  // Aligned to the granularity, with an inaccessible page at the end: what runs over is found.
  void* made = mmap(nullptr, size + 2 * granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return kOutOfMemory;
  const uint64_t start = reinterpret_cast<uintptr_t>(made), used_start = (start + granularity - 1) / granularity * granularity;
  if (used_start > start) munmap(made, used_start - start);
  const uint64_t end = start + size + 2 * granularity;
  munmap(reinterpret_cast<void*>(used_start + size + granularity), end - used_start - size - granularity);
  *place = used_start;
  reservations[used_start] = size;
  return kSuccess;
}

EXPORT Result cuMemAddressFree(Pointer place, size_t size) {
  BEGIN("cuMemAddressFree");
  const auto found = reservations.find(place);
  REQUIRE(found != reservations.end() && found->second == size && !overlaps(place, size));
  munmap(reinterpret_cast<void*>(place), size + granularity);
  reservations.erase(found);
  return kSuccess;
}

EXPORT Result cuMemCreate(Handle* handle, size_t size, const Properties* properties, unsigned long long flags) {
  BEGIN("cuMemCreate");
  REQUIRE(aligned(size) && flags == 0 && properties->win32 == nullptr && properties->type == kPinned);
  REQUIRE(properties->handle_types == 0);
  if (used + size > budget) return kOutOfMemory;
  const int fd = memfd_create("cuda_stand_in", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size) != 0) return kOutOfMemory;
  // What an earlier owner left there: a region must not count on zeros.
  void* all = mmap(nullptr, size, PROT_WRITE, MAP_SHARED, fd, 0);
  std::memset(all, 0xA5, size);
  munmap(all, size);
  used += size;
  *handle = next_handle++;
  memories[*handle] = {fd, size};
  return kSuccess;
}

EXPORT Result cuMemRelease(Handle handle) {
  BEGIN("cuMemRelease");
  const auto found = memories.find(handle);
  REQUIRE(found != memories.end() && !found->second.released);
  found->second.released = true;
  forget_if_unused(handle);
  return kSuccess;
}

EXPORT Result cuMemMap(Pointer place, size_t size, size_t offset, Handle handle, unsigned long long flags) {
  BEGIN("cuMemMap");
  const auto found = memories.find(handle);
  REQUIRE(found != memories.end() && !found->second.released && size == found->second.size && offset == 0 && flags == 0);
  REQUIRE(place % granularity == 0 && reserved(place, size) && !overlaps(place, size));
  if (mmap(reinterpret_cast<void*>(place), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  maps[place] = {size, handle};
  ++found->second.num_maps;
  return kSuccess;
}

EXPORT Result cuMemUnmap(Pointer place, size_t size) {
  BEGIN("cuMemUnmap");
  const auto found = maps.find(place);
  REQUIRE(found != maps.end() && found->second.size == size);
  mmap(reinterpret_cast<void*>(place), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  const Handle handle = found->second.handle;
  maps.erase(found);
  --memories.at(handle).num_maps;
  forget_if_unused(handle);
  return kSuccess;
}

EXPORT Result cuMemSetAccess(Pointer place, size_t size, const Access* access, size_t count) {
  BEGIN("cuMemSetAccess");
  REQUIRE(count == 1 && access->location.type == kOnDevice && access->location.id < num_devices && is_mapped(place, size));
  REQUIRE(access->flags == kReadWrite);
  return mprotect(reinterpret_cast<void*>(place), size, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}

EXPORT Result cuMemsetD8_v2(Pointer place, unsigned char value, size_t size) {
  BEGIN("cuMemsetD8_v2");
  if (contexts.empty()) return kInvalidContext;
  REQUIRE(is_mapped(place, size));
  std::memset(reinterpret_cast<void*>(place), value, size);
  return kSuccess;
}

EXPORT Result cuGetErrorName(Result result, const char** name) {
  switch (result) {
    case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; return kSuccess;
    case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return kSuccess;
    case kNotInitialized: *name = "CUDA_ERROR_NOT_INITIALIZED"; return kSuccess;
    case kInvalidContext: *name = "CUDA_ERROR_INVALID_CONTEXT"; return kSuccess;
    default: *name = nullptr; return kInvalidValue;
  }
}

EXPORT Result cuGetErrorString(Result result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : nullptr;
  return *text == nullptr ? kInvalidValue : kSuccess;
}

// ------------------------------------------------------------------------------------------------------ for the tests

EXPORT void stand_in_set(uint64_t new_granularity, uint64_t new_budget, int new_virtual_memory) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  granularity = new_granularity;
  budget = new_budget;
  has_virtual_memory = new_virtual_memory;
  calls.clear();
  faults.clear();
  log_.clear();
}

EXPORT void stand_in_fail(const char* name, long number, Result result) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  faults[name][calls[name] + number] = result;
}

EXPORT const char* stand_in_log() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  static std::string copy;
  copy.swap(log_);
  log_.clear();
  return copy.c_str();
}

// Reservations, maps, handles, contexts retained, contexts of this thread, bytes of physical memory made here.
EXPORT void stand_in_ledger(int64_t* out) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const int64_t found[] = {
      static_cast<int64_t>(reservations.size()), static_cast<int64_t>(maps.size()), static_cast<int64_t>(memories.size()),
      retained, static_cast<int64_t>(contexts.size()), static_cast<int64_t>(used)};
  std::memcpy(out, found, sizeof found);
}
