// A Python list of tensors as the operators take it, read in one pass: thousands of small tensors would otherwise cost more in
// Python than in the kernels. It says yes only to the usual case; ops/ looks closely, and names what is wrong, at all others.
#pragma once
#include <algorithm>
#include <memory>

#include "arguments.h"
#include "tensor_reader.h"

namespace halfstep {

class TensorList {
 public:
  // Null unless every tensor can be read and is of a dtype that the kernels know. Called with the GIL held.
  static std::unique_ptr<TensorList> read(const TensorReader& reader, const py::list& tensors) {
    const DropsPythonErrors errors;
    auto list = std::unique_ptr<TensorList>(new TensorList(tensors));
    list->refs_.reserve(list->objects_.size());
    list->shapes_.reserve(2 * list->objects_.size());
    for (const py::handle object : list->objects_) {
      TensorFacts facts;
      Dtype dtype;
      const TensorReader::Handle tensor = reader.tensor(object.ptr());
      if (!tensor || !reader.read(tensor, facts) || !reader.knows(facts.dtype, dtype)) return nullptr;
      if (list->refs_.empty()) list->device_index_ = reader.device_index(tensor);
      if (reader.device_index(tensor) != list->device_index_) return nullptr;
      list->refs_.push_back({const_cast<void*>(facts.data), facts.numel, dtype});
      list->shapes_.push_back(facts.dims);
      list->shapes_.insert(list->shapes_.end(), facts.sizes, facts.sizes + facts.dims);
    }
    return list;
  }

  // True if the two can be paired.
  bool has_shapes_of(const TensorList& other) const {
    return device_index_ == other.device_index_ && shapes_ == other.shapes_;
  }

  // True if all can be written at once: no two share memory, and none shares it with a tensor of `source` (null: there is
  // none), unless it is that pair's own source, the same object.
  bool apart(const TensorList* source) const {
    std::vector<Span> spans;
    spans.reserve(refs_.size() * 2);
    for (const TensorRef& ref : refs_) add(spans, ref, true);
    const auto written = static_cast<std::ptrdiff_t>(spans.size());
    for (size_t i = 0; source && i < source->refs_.size(); ++i)
      if (i >= refs_.size() || !objects_[i].is(source->objects_[i])) add(spans, source->refs_[i], false);
    const auto reads = spans.begin() + written;
    // Tensors made one after another lie nearly in order, within each list: sorting one at a time is several times faster.
    const auto before = [](const Span& a, const Span& b) { return a.start < b.start; };
    std::sort(spans.begin(), reads, before);
    std::sort(reads, spans.end(), before);
    std::inplace_merge(spans.begin(), reads, spans.end(), before);
    uintptr_t end = 0, end_of_writes = 0;
    for (const Span& span : spans) {
      if (span.start < (span.written ? end : end_of_writes)) return false;
      end = std::max(end, span.end);
      if (span.written) end_of_writes = std::max(end_of_writes, span.end);
    }
    return true;
  }

  bool are_float32() const {
    return std::all_of(refs_.begin(), refs_.end(), [](const TensorRef& ref) { return ref.dtype == Dtype::f32; });
  }

  // Addresses, sizes and dtype codes, for who launches kernels from Python.
  std::tuple<Addresses, Integers, Integers> columns() const {
    std::tuple<Addresses, Integers, Integers> all;
    auto& [where, numel, codes] = all;
    for (const TensorRef& ref : refs_) {
      where.push_back(reinterpret_cast<uintptr_t>(ref.data));
      numel.push_back(ref.numel);
      codes.push_back(static_cast<int64_t>(ref.dtype));
    }
    return all;
  }

  // The same three in one string of bytes: equal for equal lists.
  py::bytes key() const {
    std::vector<int64_t> words;
    words.reserve(3 * refs_.size());
    for (const TensorRef& ref : refs_) {
      words.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(ref.data)));
      words.push_back(ref.numel);
      words.push_back(static_cast<int64_t>(ref.dtype));
    }
    return py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
  }

  const std::vector<TensorRef>& refs() const { return refs_; }
  int32_t device_index() const { return device_index_; }

 private:
  struct Span {
    uintptr_t start, end;
    bool written;
  };

  explicit TensorList(const py::list& tensors) : objects_(tensors) {}

  static void add(std::vector<Span>& spans, const TensorRef& ref, bool written) {
    const auto start = reinterpret_cast<uintptr_t>(ref.data);
    if (ref.numel) spans.push_back({start, start + static_cast<uintptr_t>(ref.numel * item_size(ref.dtype)), written});
  }

  // Of our own: they keep the tensors alive while the kernels run without the GIL, whatever becomes of the list.
  const py::tuple objects_;
  std::vector<TensorRef> refs_;
  int32_t device_index_ = -1;    // all lie on the same device
  std::vector<int64_t> shapes_;  // of each: how many dimensions, and their sizes
};

}  // namespace halfstep
