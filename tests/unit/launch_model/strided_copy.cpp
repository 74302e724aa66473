// Runs the kernels of csrc/strided_copy_kernels.cu as C++: strided_copy CASES RESULTS.
//
// CASES, all int64 unless it says otherwise: the number of cases; of each, most_units, the number of rows, slots and
// buffers; the rows of the table, with the addresses of whoever wrote the file; the hashes; of each buffer its address,
// its bytes, whether it is written, then its content. A buffer is allocated apart, exactly as large as it is, and as
// far from a multiple of 16 as it was, so that a byte too many is seen by the address sanitizer. RESULTS: of each case
// the hashes and the contents of the written buffers. Prints the number of pieces by width, path and whether hashed.

#include "strided_copy_batch.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "../../../csrc/strided_copy_kernels.cu"

namespace {

using namespace hybrid_rl::strided;

struct Buffer {
  int64_t address, num_bytes, is_written;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, std::free};
  char* begin;
};

std::FILE* file_of(const char* path, const char* mode) {
  std::FILE* file = std::fopen(path, mode);
  if (file == nullptr) {
    std::fprintf(stderr, "cannot open %s\n", path);
    std::exit(1);
  }
  return file;
}

void read_bytes(std::FILE* file, void* target, size_t num_bytes) {
  if (std::fread(target, 1, num_bytes, file) != num_bytes) {
    std::fprintf(stderr, "the cases end too early\n");
    std::exit(1);
  }
}

std::vector<int64_t> read_numbers(std::FILE* file, size_t count) {
  std::vector<int64_t> numbers(count);
  read_bytes(file, numbers.data(), count * sizeof(int64_t));
  return numbers;
}

int64_t moved_address(int64_t address, const std::vector<Buffer>& buffers) {
  for (const Buffer& buffer : buffers) {
    if (address >= buffer.address && address < buffer.address + buffer.num_bytes) {
      return reinterpret_cast<int64_t>(buffer.begin) + address - buffer.address;
    }
  }
  return address; // null, or of a piece without elements
}

int64_t counts[kNumWidths][kNumPaths][2];

void count(const int64_t* row, bool hashed) {
  const Piece piece = normal_form(row, hashed);
  if (piece.num_elements > 0) {
    Entry e{piece, 0, 0, false, false};
    const int32_t path = path_of(e);
    ++counts[width_of(piece)][path][hashed];
  }
}

void run_case(std::FILE* cases, std::FILE* results) {
  const std::vector<int64_t> head = read_numbers(cases, 4);
  const int64_t most_units = head[0], num_rows = head[1], num_slots = head[2], num_buffers = head[3];
  std::vector<int64_t> table = read_numbers(cases, num_rows * kNumColumns);
  const std::vector<int64_t> given = read_numbers(cases, num_slots);
  std::vector<Buffer> buffers(num_buffers);
  for (Buffer& buffer : buffers) {
    const std::vector<int64_t> about = read_numbers(cases, 3);
    buffer.address = about[0];
    buffer.num_bytes = about[1];
    buffer.is_written = about[2];
    const int64_t offset = buffer.address % 16;
    buffer.memory.reset(static_cast<char*>(std::malloc(offset + buffer.num_bytes)));
    buffer.begin = buffer.memory.get() + offset;
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(buffer.memory.get(), offset / 8 * 8); // it knows eight bytes apart
#endif
    read_bytes(cases, buffer.begin, buffer.num_bytes);
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    int64_t* row = table.data() + i * kNumColumns;
    row[kSource] = moved_address(row[kSource], buffers);
    row[kDestination] = moved_address(row[kDestination], buffers);
    count(row, num_slots > 0);
  }
  const std::unique_ptr<unsigned long long[]> hashes(new unsigned long long[num_slots]);
  for (int64_t i = 0; i < num_slots; ++i) {
    hashes[i] = static_cast<unsigned long long>(given[i]);
  }
  const Batch batch(table.data(), num_rows, num_slots > 0, most_units);
  if (!batch.empty()) {
    const std::unique_ptr<char[]> memory(new char[batch.num_bytes()]);
    const cudaError_t error = batch.launch(memory.get(), num_slots > 0 ? hashes.get() : nullptr, nullptr);
    if (error != cudaSuccess) {
      std::fprintf(stderr, "a launch was refused: %d\n", static_cast<int>(error));
      std::exit(1);
    }
  }
  std::fwrite(hashes.get(), sizeof(int64_t), num_slots, results);
  for (const Buffer& buffer : buffers) {
    if (buffer.is_written) {
      std::fwrite(buffer.begin, 1, buffer.num_bytes, results);
    }
  }
}

} // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments != 3) {
    std::fprintf(stderr, "strided_copy CASES RESULTS\n");
    return 1;
  }
  std::FILE* cases = file_of(arguments[1], "rb");
  std::FILE* results = file_of(arguments[2], "wb");
  const int64_t num_cases = read_numbers(cases, 1)[0];
  for (int64_t i = 0; i < num_cases; ++i) {
    run_case(cases, results);
  }
  std::fclose(results);
  std::fclose(cases);
  for (int width = 0; width < kNumWidths; ++width) {
    for (int path = 0; path < kNumPaths; ++path) {
      for (int hashed = 0; hashed < 2; ++hashed) {
        std::printf("%d %d %d %lld\n", width, path, hashed, static_cast<long long>(counts[width][path][hashed]));
      }
    }
  }
  return 0;
}
