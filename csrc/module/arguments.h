// What every binding needs: Python's numbers checked and turned into the types of the kernels. A caller's mistake must be an
// exception, never an access out of bounds.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "adam_math.h"
#include "ieee_mode.h"
#include "tensor_table.h"

namespace halfstep {

namespace py = pybind11;

using Addresses = std::vector<uint64_t>;
using Integers = std::vector<int64_t>;
using Group = std::tuple<double, double, double, double, double, bool, bool>;  // AdamGroup's fields, in order

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(HALFSTEP_MODULE ": " + what); }

inline void check_length(const char* name, size_t got, size_t expected) {
  if (got != expected)
    refuse(std::string(name) + " has " + std::to_string(got) + " entries, expected " + std::to_string(expected));
}

inline Dtype dtype_from(int64_t code) {
  if (code < 0 || code >= kDtypes)
    refuse("dtype code " + std::to_string(code) + " is not 0 (f32), 1 (bf16) or 2 (f16)");
  return static_cast<Dtype>(code);
}

// Factors arrive as double and are rounded here: on a thread that flushes denormals, pybind11's own conversion to float
// would make a tiny one 0.
inline float rounded(double value) {
  const IeeeMode mode;
  return pinned(static_cast<float>(pinned(value)));
}

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline std::vector<TensorRef> tensors(const Addresses& data, const Integers& numel, const Integers& dtype) {
  check_length("numel", numel.size(), data.size());
  check_length("dtype", dtype.size(), data.size());
  std::vector<TensorRef> out(data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    if (numel[i] < 0) refuse("tensor " + std::to_string(i) + " has a negative size");
    if (numel[i] > 0 && data[i] == 0) refuse("tensor " + std::to_string(i) + " has no storage");
    out[i] = {pointer<void>(data[i]), numel[i], dtype_from(dtype[i])};
  }
  return out;
}

inline AdamGroup group_from(const Group& g) {
  return {std::get<0>(g), std::get<1>(g), std::get<2>(g), std::get<3>(g),
          std::get<4>(g), std::get<5>(g), std::get<6>(g)};
}

}  // namespace halfstep
