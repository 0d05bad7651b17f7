// One launch over many tensors: their table travels by value as a kernel parameter (the "multi-tensor apply" of NVIDIA apex,
// with the larger parameter space of CUDA 12.1 and later), so nothing is copied to the device first.
#pragma once
#include <cuda_runtime.h>

#include "tensor_table.h"

namespace halfstep {

constexpr size_t kParameterBytes = 32764;              // of one kernel, compute capability 7.0 and later
constexpr size_t kTableBytes = kParameterBytes - 252;  // leaves room for the other arguments
constexpr int kThreads = 256;                          // of a block of the elementwise kernels
constexpr int64_t kBlockElements = 16384;              // of one tensor, for one such block
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// Row has `numel` and `first_block`: rows lie in the order of their blocks, and none is empty.
template <class Row>
struct Table {
  static constexpr int kCapacity = static_cast<int>((kTableBytes - 8) / sizeof(Row));
  Row row[kCapacity];
  int32_t count;
};

// What one block has to do: n elements of a row, from begin on. Offsets are of 64 bits: tensors of more than 2^31 elements exist.
struct Share {
  int row;
  int n;
  int64_t begin;
};

template <int64_t kElements, class Row>
__device__ __forceinline__ Share share_of(const Table<Row>& table, int block) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.row[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  const int64_t begin = static_cast<int64_t>(block - table.row[low].first_block) * kElements;
  const int64_t left = table.row[low].numel - begin;
  return {low, static_cast<int>(left < kElements ? left : kElements), begin};
}

}  // namespace halfstep
