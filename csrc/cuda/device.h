// What every launch needs of the CUDA runtime: the device, the caller's stream, and errors that say what to do.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.cuh"

namespace halfstep {

// Where the work goes: everything is put on the stream, nothing waits.
struct Queue {
  int device;
  uint64_t stream;  // a cudaStream_t
};

// Throws std::runtime_error in the user's words unless the result is cudaSuccess.
void check(cudaError_t result, const std::string& what);

// The queue's device for as long as the object lives. A device that is not there, or no driver, is said here.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int device_, previous_ = 0;
};

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, const Queue& queue,
            const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ...) <= kParameterBytes, "the kernel's parameters do not fit");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(queue.stream));
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Gives rows that are not empty their blocks and hands them on, table by table: go(table, blocks).
template <int64_t kElements, class Row, class Go>
void for_each_table(const std::vector<Row>& rows, Go go) {
  Table<Row> table;
  for (size_t next = 0; next < rows.size();) {
    int64_t blocks = 0;
    table.count = 0;
    while (next < rows.size() && table.count < Table<Row>::kCapacity) {
      const int64_t more = (rows[next].numel + kElements - 1) / kElements;
      if (table.count > 0 && blocks + more > INT32_MAX) break;
      if (more > INT32_MAX) throw std::length_error("halfstep: a tensor is too large for one launch");
      table.row[table.count] = rows[next++];
      table.row[table.count++].first_block = static_cast<int32_t>(blocks);
      blocks += more;
    }
    go(table, blocks);
  }
}

}  // namespace halfstep
