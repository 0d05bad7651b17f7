// Parameters and states that a plan has pointers into: are they still where they were? Only called with the GIL held. Python
// objects are compared by address and never kept: ops/ keeps those it passes alive, and a cycle through C++ could not be
// collected.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "tensor_reader.h"
#include "tensor_table.h"

namespace halfstep {

namespace py = pybind11;

constexpr int64_t kTogether = 32;  // tensors that are looked at together

// Tensors that stay alive though Python may let go of them: between two calls, or while the kernels run without its lock.
class KeptTensors {
 public:
  explicit KeptTensors(const TensorReader& reader) : reader_(reader) {}
  ~KeptTensors() { drop(); }
  KeptTensors(const KeptTensors&) = delete;

  void make_room(size_t count) { kept_.assign(count, reader_.none()); }
  void put(size_t i, TensorReader::Handle tensor) { reader_.refer(kept_[i], tensor); }
  void drop() {
    for (TensorReader::Reference& tensor : kept_) reader_.let_go(tensor);
    kept_.clear();
  }

 private:
  const TensorReader reader_;  // a copy: this may outlive the Python object
  std::vector<TensorReader::Reference> kept_;
};

// All parameters of an optimizer on one device, and which row of the plan each one is: -1 = it has no gradient.
class ParamWatch {
 public:
  ParamWatch() = default;
  ParamWatch(const TensorReader& reader, const py::list& params, const std::vector<int64_t>& row, size_t rows)
      : params_(params.size()), rows_(rows) {
    if (row.size() != params_.size()) throw std::invalid_argument(HALFSTEP_MODULE ": one row per parameter, or -1");
    for (size_t i = 0; i < params_.size(); ++i) {
      if (row[i] >= static_cast<int64_t>(rows)) throw std::invalid_argument(HALFSTEP_MODULE ": no such row");
      params_[i].object = params[i].ptr();
      params_[i].row = row[i];
      const TensorReader::Handle tensor = reader.tensor(params_[i].object);
      readable_ = readable_ && tensor && reader.read(tensor, params_[i].facts);
    }
  }

  // The gradients, in the order of the rows; false if a parameter is another one or elsewhere, has a gradient where it had
  // none or the reverse, or a gradient is not plain and contiguous. `kept` takes what holds the memory.
  // On this thread alone: of an unusual tensor torch may ask Python, whose lock this thread holds.
  bool read(const TensorReader& reader, const py::list& params, std::vector<TensorRef>& grads,
            KeptTensors& kept) const {
    if (!readable_ || params.size() != params_.size()) return false;
    const int64_t count = static_cast<int64_t>(params_.size());
    for (int64_t i = 0; i < count; ++i)
      if (PyList_GET_ITEM(params.ptr(), i) != params_[static_cast<size_t>(i)].object) return false;
    grads.resize(rows_);
    kept.make_room(rows_);
    for (int64_t first = 0; first < count; first += kTogether)
      if (!read_block(reader, first, grads, kept)) return false;
    for (int64_t i = 0; i < count; ++i)
      if (params_[static_cast<size_t>(i)].row >= 0 && !reader.bump_version(reader.tensor(object(i)))) return false;
    return true;
  }

 private:
  struct Param {
    PyObject* object;
    int64_t row;
    TensorFacts facts;
  };

  PyObject* object(int64_t i) const { return params_[static_cast<size_t>(i)].object; }

  // In steps over the whole block: where the tensors are out of the caches, as after a backward, most of this is waiting for
  // memory, and one tensor's arrives while the others' is asked for.
  bool read_block(const TensorReader& reader, int64_t first, std::vector<TensorRef>& grads, KeptTensors& kept) const {
    const int64_t count = static_cast<int64_t>(params_.size());
    const int64_t n = std::min(kTogether, count - first);
    TensorReader::Handle tensors[kTogether], found[kTogether];
    for (int64_t k = 0; k < n; ++k) {
      if (first + n + k < count) __builtin_prefetch(object(first + n + k));
      tensors[k] = reader.tensor(object(first + k));
      if (!tensors[k]) return false;
      reader.prefetch(tensors[k]);
    }
    for (int64_t k = 0; k < n; ++k) {
      found[k] = reader.grad(tensors[k]);
      reader.prefetch(found[k]);
    }
    for (int64_t k = 0; k < n; ++k)
      if (!reader.still(tensors[k], params_[static_cast<size_t>(first + k)].facts)) return false;
    for (int64_t k = 0; k < n; ++k) {
      const Param& param = params_[static_cast<size_t>(first + k)];
      if (reader.is_defined(found[k]) != (param.row >= 0)) return false;
      if (param.row >= 0 && !take(reader, param, found[k], grads, kept)) return false;
    }
    return true;
  }

  static bool take(const TensorReader& reader, const Param& param, TensorReader::Handle grad,
                   std::vector<TensorRef>& grads, KeptTensors& kept) {
    const size_t row = static_cast<size_t>(param.row);
    const void* data;
    if (!reader.is_like(grad, param.facts, data, grads[row].dtype)) return false;
    grads[row].data = const_cast<void*>(data);
    grads[row].numel = param.facts.numel;
    kept.put(row, grad);
    return true;
  }

  std::vector<Param> params_;
  size_t rows_ = 0;
  bool readable_ = true;
};

// Dictionaries of state tensors that somebody else may hold.
class StateWatch {
 public:
  StateWatch(const TensorReader& reader, const py::list& states) : states_(states.size()) {
    const DropsPythonErrors errors;
    for (size_t i = 0; i < states_.size(); ++i) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(states[i].cast<py::dict>().ptr(), &at, &key, &value);) {
        readable_ = readable_ && PyUnicode_CheckExact(key);
        if (!readable_) return;
        states_[i].push_back({py::reinterpret_borrow<py::object>(key), value, TensorFacts()});
        const TensorReader::Handle tensor = reader.tensor(value);
        readable_ = tensor && reader.read(tensor, states_[i].back().facts);
      }
    }
  }

  // True if each holds the same tensors under the same keys, and they have the same facts.
  bool still(const TensorReader& reader, const py::list& states) const {
    const DropsPythonErrors errors;
    if (!readable_ || states.size() != states_.size()) return false;
    for (size_t i = 0; i < states_.size(); ++i) {
      PyObject* state = PyList_GET_ITEM(states.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyDict_Check(state) || PyDict_Size(state) != static_cast<Py_ssize_t>(states_[i].size())) return false;
      PyObject *key, *value;
      Py_ssize_t at = 0;
      for (const Entry& expected : states_[i]) {
        if (!PyDict_Next(state, &at, &key, &value)) return false;
        if (key != expected.key.ptr() || value != expected.value) return false;
        const TensorReader::Handle tensor = reader.tensor(value);
        if (!tensor || !reader.still(tensor, expected.facts)) return false;
      }
    }
    return true;
  }

 private:
  struct Entry {
    py::object key;  // kept: a string, in no cycle, whose address must not become another's
    PyObject* value;
    TensorFacts facts;
  };
  std::vector<std::vector<Entry>> states_;
  bool readable_ = true;
};

}  // namespace halfstep
