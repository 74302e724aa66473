// The operator for CUDA as PyTorch sees it; its kernels are in strided_copy_kernels.cu.

#include "strided_copy_batch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace {

using namespace hybrid_rl::strided;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// table on the CPU, hashes on the device that writes, [0] for none. Addresses are the caller's word: the destinations are
// memory of that device, the sources may be that of any GPU which it can access. It works on that device's stream.
void strided_copy(const Tensor& table, const Tensor& hashes) {
  STD_TORCH_CHECK(
      table.is_cpu() && table.dim() == 2 && table.size(1) == kNumColumns && table.scalar_type() == ScalarType::Long &&
          table.is_contiguous(),
      "hybrid_rl::strided_copy: table must be contiguous int64 [P, ", kNumColumns, "] on the CPU");
  STD_TORCH_CHECK(
      hashes.is_cuda() && hashes.dim() == 1 && hashes.scalar_type() == ScalarType::Long && hashes.is_contiguous(),
      "hybrid_rl::strided_copy: hashes must be contiguous int64 on the device, one-dimensional");
  const bool hashed = hashes.size(0) > 0;
  const Batch batch(static_cast<const int64_t*>(table.const_data_ptr()), table.size(0), hashed);
  if (batch.empty()) {
    return;
  }
  STD_TORCH_CHECK(
      batch.most_blocks() < (int64_t{1} << 31), "hybrid_rl::strided_copy: one call takes at most 2^44 elements; give fewer");
  const int device = hashes.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  // Not STABLE_TORCH_ERROR_CODE_CHECK: torch 2.11 has no macro of that name.
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  // The allocator gives this memory to later work of the stream only, so it may be let go of before the kernels have run.
  const int64_t num_words = static_cast<int64_t>(batch.num_bytes() / sizeof(int64_t));
  const Tensor memory = torch::stable::new_empty(hashes, {&num_words, 1}, ScalarType::Long);
  auto* sums = hashed ? static_cast<unsigned long long*>(hashes.mutable_data_ptr()) : nullptr;
  const cudaError_t error = batch.launch(memory.mutable_data_ptr(), sums, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "hybrid_rl::strided_copy: the launch failed: ", cudaGetErrorString(error));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CUDA, library) {
  library.impl("strided_copy", TORCH_BOX(&strided_copy));
}
