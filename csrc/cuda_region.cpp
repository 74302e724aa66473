// See cuda_region.h. Books are kept per chunk: whether its physical memory exists, and whether it is mapped. Each driver
// call changes one entry, after it has succeeded; so whatever fails, the books tell what is left to undo.

#include "cuda_region.h"

#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace hybrid_rl::cuda {
namespace {

struct Failure {
  int32_t code = 0;
  char text[600] = "";

  explicit operator bool() const {
    return code != 0;
  }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    const size_t used = std::strlen(text);
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(text + used, sizeof text - used, format, rest);
    va_end(rest);
  }
};

__attribute__((format(printf, 2, 3))) Failure failure(int32_t code, const char* format, ...) {
  Failure made;
  made.code = code;
  va_list rest;
  va_start(rest, format);
  std::vsnprintf(made.text, sizeof made.text, format, rest);
  va_end(rest);
  return made;
}

Failure failed_call(const Driver& driver, Result result, const char* call, uint64_t bytes) {
  const char *name = nullptr, *text = nullptr;
  if (driver.cuGetErrorName(result, &name) != kSuccess || name == nullptr) {
    name = "an error without a name";
  }
  if (driver.cuGetErrorString(result, &text) != kSuccess || text == nullptr) {
    text = "no description";
  }
  Failure made = failure(result, "%s", call);
  if (bytes != 0) {
    made.add(" of %llu bytes", static_cast<unsigned long long>(bytes));
  }
  made.add(" gave %s (%d: %s)", name, result, text);
  return made;
}

// Calls a function of the driver; returns from the caller with a Failure if it fails.
#define HYBRID_RL_CALL(function, bytes, ...) \
  if (const Result result = driver_.function(__VA_ARGS__); result != kSuccess) { \
    return failed_call(driver_, result, #function, bytes); \
  }

// The functions of a libcuda, looked up once per process and path, and never unloaded.
const Driver* load(const char* path, Failure& why) {
  static std::mutex mutex;
  static std::map<std::string, Driver>& known = *new std::map<std::string, Driver>; // outlives the end of the process
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(path); found != known.end()) {
    return &found->second;
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    why = failure(kNoDriver, "%s cannot be loaded (%s)", path, dlerror());
    return nullptr;
  }
  Driver driver;
#define HYBRID_RL_LOOK_UP(name, ...) \
  driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, #name)); \
  if (driver.name == nullptr) { \
    why = failure(kNoDriver, "%s has no function %s; install a newer driver", path, #name); \
    return nullptr; \
  }
  HYBRID_RL_CUDA_FUNCTIONS(HYBRID_RL_LOOK_UP)
#undef HYBRID_RL_LOOK_UP
  if (const Result result = driver.cuInit(0); result != kSuccess) {
    why = failed_call(driver, result, "cuInit", 0);
    return nullptr;
  }
  return &known.emplace(path, driver).first->second;
}

uint64_t round_up(uint64_t number, uint64_t step) {
  return (number + step - 1) / step * step;
}

struct Chunk {
  uint64_t offset, size;
  Handle handle = 0;
  bool created = false, mapped = false;
  bool fresh = false; // filled by the call that is running
};

} // namespace
} // namespace hybrid_rl::cuda

using namespace hybrid_rl::cuda;
using namespace hybrid_rl::dlpack;

struct HybridRlRegion {
 public:
  HybridRlRegion(const Driver& driver, int device, uint64_t chunk)
      : driver_(driver), ordinal_(device), chunk_(chunk) {}

  Failure reserve(uint64_t capacity) {
    HYBRID_RL_CALL(cuDeviceGet, 0, &device_, ordinal_);
    int has = 0;
    HYBRID_RL_CALL(cuDeviceGetAttribute, 0, &has, kHasVirtualMemory, device_);
    if (has == 0) {
      return failure(kNoSupport, "device %d and its driver offer no virtual memory management", ordinal_);
    }
    HYBRID_RL_CALL(cuDevicePrimaryCtxRetain, 0, &context_, device_);
    has_context_ = true;
    const Properties properties = this->properties();
    size_t granularity = 0;
    HYBRID_RL_CALL(cuMemGetAllocationGranularity, 0, &granularity, &properties, kRecommended);
    granularity_ = std::max<uint64_t>(granularity, 1);
    chunk_ = round_up(std::max<uint64_t>(chunk_, 1), granularity_);
    const uint64_t rounded = round_up(std::max<uint64_t>(capacity, 1), granularity_);
    HYBRID_RL_CALL(cuMemAddressReserve, rounded, &base_, rounded, 0, 0, 0);
    capacity_ = rounded;
    return {};
  }

  Failure grow(uint64_t bytes) {
    if (Failure why = require_awake("grown")) {
      return why;
    }
    const uint64_t have = chunks_.empty() ? 0 : chunks_.back().offset + chunks_.back().size;
    const uint64_t want = round_up(bytes, granularity_);
    if (want > capacity_) {
      return failure(
          kTooSmall, "%llu bytes are beyond the %llu that were reserved", static_cast<unsigned long long>(bytes),
          static_cast<unsigned long long>(capacity_));
    }
    if (want <= have) {
      return {};
    }
    const size_t before = chunks_.size();
    chunks_.reserve(before + (want - have + chunk_ - 1) / chunk_);
    for (uint64_t offset = have; offset < want; offset += chunk_) {
      chunks_.push_back({offset, std::min(chunk_, want - offset)});
    }
    Failure why = fill();
    if (why && state_ != kBroken) {
      chunks_.resize(before, Chunk{});
    }
    return why;
  }

  Failure sleep() {
    if (Failure why = require_awake("put to sleep")) {
      return why;
    }
    if (Failure why = synchronize()) {
      return why;
    }
    Failure why = give_back_all();
    if (!why) {
      state_ = kAsleep;
      return {};
    }
    if (const Failure again = fill()) {
      state_ = kBroken;
      why.add("; nor can what was given back be had again: %s", again.text);
    } else {
      why.add("; it stays awake, and its content is lost");
    }
    return why;
  }

  Failure wake() {
    if (state_ != kAsleep) {
      return failure(kWrongState, "it is %s, not asleep", state_name());
    }
    Failure why = fill();
    if (!why) {
      state_ = kAwake;
    }
    return why;
  }

  Failure close() {
    if (state_ == kClosed) {
      return {};
    }
    Failure waited = synchronize(); // what it reports is an earlier kernel's; the memory goes anyway
    Failure why = give_back_all();
    state_ = why ? kBroken : kClosed;
    if (!why && waited) {
      waited.add("; the memory was given back");
      return waited;
    }
    return why;
  }

  // Everything, for the last holder: there is nobody to tell of a failure, so what fails is tried once more.
  void destroy() {
    if (has_context_) {
      const bool entered = enter() == kSuccess || enter() == kSuccess;
      if (entered) {
        driver_.cuCtxSynchronize();
      }
      if (give_back_all()) {
        give_back_all();
      }
      const bool empty = std::none_of(chunks_.begin(), chunks_.end(), [](const Chunk& c) { return c.created; });
      if (capacity_ != 0 && empty && driver_.cuMemAddressFree(base_, capacity_) != kSuccess) {
        driver_.cuMemAddressFree(base_, capacity_);
      }
      if (entered) {
        leave();
      }
      if (driver_.cuDevicePrimaryCtxRelease_v2(device_) != kSuccess) {
        driver_.cuDevicePrimaryCtxRelease_v2(device_);
      }
    }
    delete this;
  }

  Result enter() {
    return driver_.cuCtxPushCurrent_v2(context_);
  }

  void leave() {
    Context popped = nullptr; // set if it was popped, whatever earlier failure the call reports
    if (driver_.cuCtxPopCurrent_v2(&popped) != kSuccess && popped == nullptr) {
      driver_.cuCtxPopCurrent_v2(&popped);
    }
  }

  Failure failed_enter(Result result) const {
    return failed_call(driver_, result, "cuCtxPushCurrent", 0);
  }

  Failure require_mapped(uint64_t offset, uint64_t bytes) const {
    if (Failure why = require_awake("used")) {
      return why;
    }
    const uint64_t have = chunks_.empty() ? 0 : chunks_.back().offset + chunks_.back().size;
    if (offset > have || bytes > have - offset) {
      return failure(kTooSmall, "a tensor ends beyond the %llu bytes that are mapped", static_cast<unsigned long long>(have));
    }
    return {};
  }

  HybridRlRegionInfo info() const {
    uint64_t mapped = 0;
    for (const Chunk& chunk : chunks_) {
      mapped += chunk.created ? chunk.size : 0;
    }
    return {base_, capacity_, granularity_, mapped, state_};
  }

  std::mutex mutex; // held during every call
  std::atomic<int64_t> holders{1};

 private:
  Failure require_awake(const char* what) const {
    return state_ == kAwake ? Failure{} : failure(kWrongState, "it is %s and cannot be %s", state_name(), what);
  }

  const char* state_name() const {
    constexpr const char* names[] = {"awake", "asleep", "closed", "broken"};
    return names[state_];
  }

  Properties properties() const {
    Properties made{};
    made.type = kPinned;
    made.location = {kOnDevice, device_};
    return made;
  }

  Failure synchronize() const {
    HYBRID_RL_CALL(cuCtxSynchronize, 0);
    return {};
  }

  // Every chunk that is not mapped gets memory of zeros. Undoes what it did if one of them gets none.
  Failure fill() {
    Failure why;
    for (Chunk& chunk : chunks_) {
      chunk.fresh = !chunk.mapped;
      if (chunk.fresh && (why = fill(chunk))) {
        break;
      }
    }
    if (!why) {
      why = synchronize(); // until the zeros are there
    }
    Failure undone;
    for (Chunk& chunk : chunks_) {
      if (why && chunk.fresh) {
        if (const Failure also = give_back(chunk)) {
          undone = also;
        }
      }
      chunk.fresh = false;
    }
    if (undone) {
      state_ = kBroken;
      why.add("; undoing it failed too: %s", undone.text);
    }
    return why;
  }

  Failure fill(Chunk& chunk) {
    const Pointer place = base_ + chunk.offset;
    if (!chunk.created) {
      const Properties properties = this->properties();
      HYBRID_RL_CALL(cuMemCreate, chunk.size, &chunk.handle, chunk.size, &properties, 0);
    }
    chunk.created = true;
    HYBRID_RL_CALL(cuMemMap, chunk.size, place, chunk.size, 0, chunk.handle, 0);
    chunk.mapped = true;
    const Access access{{kOnDevice, device_}, kReadWrite};
    HYBRID_RL_CALL(cuMemSetAccess, chunk.size, place, chunk.size, &access, 1);
    HYBRID_RL_CALL(cuMemsetD8_v2, chunk.size, place, 0, chunk.size);
    return {};
  }

  Failure give_back(Chunk& chunk) {
    if (chunk.mapped) {
      HYBRID_RL_CALL(cuMemUnmap, chunk.size, base_ + chunk.offset, chunk.size);
      chunk.mapped = false;
    }
    if (chunk.created) {
      HYBRID_RL_CALL(cuMemRelease, chunk.size, chunk.handle);
      chunk.created = false;
    }
    return {};
  }

  Failure give_back_all() {
    Failure first;
    for (Chunk& chunk : chunks_) {
      if (const Failure why = give_back(chunk); why && !first) {
        first = why;
      }
    }
    return first;
  }

  const Driver& driver_;
  const int ordinal_;
  Device device_ = 0;
  Context context_ = nullptr;
  bool has_context_ = false;
  Pointer base_ = 0;
  uint64_t capacity_ = 0, granularity_ = 1, chunk_;
  std::vector<Chunk> chunks_;
  int32_t state_ = kAwake;
};

namespace {

struct View {
  DLManagedTensor managed;
  int64_t shape[1], strides[1];
};

int32_t told(const Failure& why, char* message, uint64_t room) {
  if (why && room > 0) {
    std::snprintf(message, room, "%s", why.text);
  }
  return why.code;
}

// Runs a call with the region's context current and nobody else in the region.
template <typename Call>
int32_t within(HybridRlRegion* region, char* message, uint64_t room, Call call) noexcept {
  Failure why;
  try {
    const std::lock_guard<std::mutex> lock(region->mutex);
    if (const Result result = region->enter(); result != kSuccess) {
      return told(region->failed_enter(result), message, room);
    }
    try {
      why = call();
    } catch (...) { // only vectors throw, before any call of the driver
      why = failure(kNoHostMemory, "no host memory for the books of the region");
    }
    region->leave();
  } catch (...) {
    why = failure(kNoHostMemory, "the lock of the region failed");
  }
  return told(why, message, room);
}

void drop(HybridRlRegion* region) noexcept {
  if (region->holders.fetch_sub(1) == 1) {
    region->destroy();
  }
}

void drop_view(DLManagedTensor* managed) {
  drop(static_cast<HybridRlRegion*>(managed->context));
  delete reinterpret_cast<View*>(managed);
}

HybridRlRegion* make(const char* path, int device, uint64_t capacity, uint64_t chunk, Failure& why) {
  const Driver* driver = load(path, why);
  if (driver == nullptr) {
    return nullptr;
  }
  auto* region = new HybridRlRegion(*driver, device, chunk);
  why = region->reserve(capacity);
  if (why) {
    region->destroy();
    return nullptr;
  }
  return region;
}

} // namespace

int32_t hybrid_rl_region_new(
    const char* driver, int32_t device, uint64_t capacity, uint64_t chunk, HybridRlRegion** made, char* message,
    uint64_t room) {
  Failure why;
  try {
    *made = make(driver, device, capacity, chunk, why);
  } catch (...) {
    why = failure(kNoHostMemory, "no host memory for the books of the region");
  }
  return told(why, message, room);
}

int32_t hybrid_rl_region_grow(HybridRlRegion* region, uint64_t bytes, char* message, uint64_t room) {
  return within(region, message, room, [&] { return region->grow(bytes); });
}

int32_t hybrid_rl_region_sleep(HybridRlRegion* region, char* message, uint64_t room) {
  return within(region, message, room, [&] { return region->sleep(); });
}

int32_t hybrid_rl_region_wake(HybridRlRegion* region, char* message, uint64_t room) {
  return within(region, message, room, [&] { return region->wake(); });
}

int32_t hybrid_rl_region_close(HybridRlRegion* region, char* message, uint64_t room) {
  return within(region, message, room, [&] { return region->close(); });
}

int32_t hybrid_rl_region_tensor(
    HybridRlRegion* region, uint64_t offset, uint64_t bytes, int32_t device_type, int32_t device_id, void** made,
    char* message, uint64_t room) {
  View* view = new (std::nothrow) View;
  if (view == nullptr) {
    return told(failure(kNoHostMemory, "no host memory for a tensor"), message, room);
  }
  try {
    const std::lock_guard<std::mutex> lock(region->mutex);
    if (const Failure why = region->require_mapped(offset, bytes)) {
      delete view;
      return told(why, message, room);
    }
  } catch (...) {
    delete view;
    return told(failure(kNoHostMemory, "the lock of the region failed"), message, room);
  }
  view->shape[0] = static_cast<int64_t>(bytes);
  view->strides[0] = 1;
  constexpr uint8_t kUnsigned = 1;
  void* data = reinterpret_cast<void*>(static_cast<uintptr_t>(region->info().address + offset));
  view->managed = {
      {data, device_type, device_id, 1, kUnsigned, 8, 1, view->shape, view->strides, 0}, region, drop_view};
  region->holders.fetch_add(1);
  *made = &view->managed;
  return 0;
}

void hybrid_rl_region_drop_tensor(void* tensor) {
  drop_view(static_cast<DLManagedTensor*>(tensor));
}

void hybrid_rl_region_drop(HybridRlRegion* region) {
  drop(region);
}

void hybrid_rl_region_info(HybridRlRegion* region, HybridRlRegionInfo* info) {
  const std::lock_guard<std::mutex> lock(region->mutex);
  *info = region->info();
}
