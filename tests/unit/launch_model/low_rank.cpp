// Runs the kernel of csrc/low_rank_kernels.cu as C++, as a library: on a table with the addresses of its process.

#include "../../../csrc/low_rank_kernels.cu"

#include <memory>

extern "C" int run(const int64_t* table, int64_t num_rows) {
  const hybrid_rl::low_rank::Batch batch(table, num_rows);
  if (batch.empty()) {
    return 0;
  }
  const std::unique_ptr<char[]> memory(new char[batch.num_bytes()]);
  return batch.launch(memory.get(), nullptr);
}
