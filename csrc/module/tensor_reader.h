// Reads where a Python torch.Tensor lies, at the speed of C++ and without a torch header: a step over thousands of small
// tensors would otherwise spend most of its time asking Python for pointers. Of torch it uses the C interface that compiled
// models rely on (aoti_torch_*) and three C++ functions that it lacks, all found in the libraries that are loaded already; where a
// tensor object keeps its at::Tensor is found out, not assumed. Where any of this fails, ops/ asks from Python.
#pragma once
#include <Python.h>

#include <cstdint>
#include <string>

#include "tensor_table.h"

namespace halfstep {

// What a raw pointer into a contiguous tensor depends on, in one cache line: a step compares thousands of them.
struct TensorFacts {
  static constexpr int kDims = 5;  // tensors of more are left to Python

  const void* data = nullptr;
  int64_t numel = 0;
  int32_t dtype = -1;  // torch's number for it
  int32_t dims = 0;
  int64_t sizes[kDims];
};

// Of a tensor whose Python code raises, torch's C interface says no and leaves Python's error behind. It is dropped at the end
// of a function that has this: the closer look from Python will meet it again.
struct DropsPythonErrors {
  ~DropsPythonErrors() { PyErr_Clear(); }
};

class TensorReader {
 public:
  using Handle = const void*;  // the address of an at::Tensor

  // `folder` has torch's libraries; tensors of `device_type` ("cpu" or "cuda") can be read. `probe` is a tensor and `implementation` its ._cdata. Throws std::runtime_error if this
  // torch cannot be read.
  TensorReader(const std::string& folder, const std::string& device_type, PyObject* tensor_type,
               PyObject* parameter_type, PyObject* probe, uint64_t implementation);

  // The tensor in a Python object, or null if it is of a subclass, which may be anything.
  Handle tensor(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != parameter_type_ && type != tensor_type_) return nullptr;
    return reinterpret_cast<const char*>(object) + offset_;
  }

  // The tensor's gradient, undefined if it has none.
  Handle grad(Handle tensor) const { return grad_of_(*static_cast<const void* const*>(tensor)); }
  bool is_defined(Handle tensor) const {
    bool defined;
    return !is_defined_(tensor, &defined) && defined;
  }

  // False unless it is contiguous and lies in the device's memory as it is: not sparse, and nothing that is computed on reading.
  bool read(Handle tensor, TensorFacts& facts) const;

  // True if a tensor that was read still has the same facts.
  bool still(Handle tensor, const TensorFacts& facts) const;

  // True if `read` would succeed, with these sizes and a dtype that the kernels know.
  bool is_like(Handle tensor, const TensorFacts& like, const void*& data, Dtype& dtype) const;

  // Which of the devices it lies on (-1: the type has only one).
  int32_t device_index(Handle tensor) const {
    int32_t index;
    return device_index_of_(tensor, &index) ? -2 : index;
  }

  // True if the kernels know the dtype of torch's number `torchs`.
  bool knows(int32_t torchs, Dtype& dtype) const;

  // As autograd wants to know of a tensor that is written in place. False for one that has no version, as inference tensors.
  bool bump_version(Handle tensor) const noexcept {
    try {
      bump_version_(tensor);
      return true;
    } catch (...) {
      return false;
    }
  }

  // Asks for the memory of the tensor's description, before it is read.
  static void prefetch(Handle tensor) {
    const char* implementation = *static_cast<const char* const*>(tensor);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(implementation + 64 * line);
  }

  // An at::Tensor of our own: as one that refers to nothing, and made to refer to what another does (or to nothing again), which
  // keeps that alive. No memory is allocated for it, as a handle of the C interface would need.
  using Reference = const void*;
  Reference none() const { return *static_cast<const Reference*>(nothing_); }
  void refer(Reference& reference, Handle tensor) const { assign_(tensor, &reference); }
  void let_go(Reference& reference) const { assign_(nothing_, &reference); }

 private:
  bool is_plain(Handle tensor) const;
  bool has_sizes(Handle tensor, const TensorFacts& facts) const;

  PyObject *tensor_type_, *parameter_type_;  // borrowed: torch keeps its classes
  Py_ssize_t offset_ = 0;                    // of the at::Tensor in the Python object
  Handle nothing_ = nullptr;                 // an undefined at::Tensor, never freed
  int32_t device_type_, strided_, dtypes_[kDtypes];
  Handle (*grad_of_)(const void*);  // const at::Tensor& c10::TensorImpl::grad() const
  bool (*is_negated_)(Handle);      // bool at::native::is_neg(const at::Tensor&)
  void (*bump_version_)(Handle);    // void torch::autograd::impl::bump_version(const at::Tensor&)
  int32_t (*is_defined_)(Handle, bool*);
  int32_t (*assign_)(Handle, Reference*);
  int32_t (*device_type_of_)(Handle, int32_t*);
  int32_t (*device_index_of_)(Handle, int32_t*);
  int32_t (*layout_of_)(Handle, int32_t*);
  int32_t (*dtype_of_)(Handle, int32_t*);
  int32_t (*dims_of_)(Handle, int64_t*);
  int32_t (*sizes_of_)(Handle, int64_t**);
  int32_t (*is_contiguous_)(Handle, bool*);
  int32_t (*data_of_)(Handle, void**);
};

}  // namespace halfstep
