// The operator low_rank_merge for CUDA as PyTorch sees it; its kernel is in low_rank_kernels.cu.

#include "low_rank_batch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace {

using namespace hybrid_rl::low_rank;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// table on the CPU. marker: any tensor on the device that holds everything; it works on that device's stream. Addresses are
// the caller's word.
void low_rank_merge(const Tensor& table, const Tensor& marker) {
  STD_TORCH_CHECK(
      table.is_cpu() && table.dim() == 2 && table.size(1) == kNumColumns && table.scalar_type() == ScalarType::Long &&
          table.is_contiguous(),
      "hybrid_rl::low_rank_merge: table must be contiguous int64 [P, ", static_cast<int64_t>(kNumColumns), "] on the CPU");
  const Batch batch(static_cast<const int64_t*>(table.const_data_ptr()), table.size(0));
  if (batch.empty()) {
    return;
  }
  STD_TORCH_CHECK(
      batch.num_blocks() < (int64_t{1} << 31), "hybrid_rl::low_rank_merge: one call takes at most 2^43 elements; give fewer");
  const int device = marker.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  // Not STABLE_TORCH_ERROR_CODE_CHECK: torch 2.11 has no macro of that name.
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  // The allocator gives this memory to later work of the stream only, so it may be let go of before the kernel has run.
  const int64_t num_words = static_cast<int64_t>(batch.num_bytes() / sizeof(int64_t));
  const Tensor memory = torch::stable::new_empty(marker, {&num_words, 1}, ScalarType::Long);
  const cudaError_t error = batch.launch(memory.mutable_data_ptr(), static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "hybrid_rl::low_rank_merge: the launch failed: ", cudaGetErrorString(error));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(hybrid_rl, CUDA, library) {
  library.impl("low_rank_merge", TORCH_BOX(&low_rank_merge));
}
