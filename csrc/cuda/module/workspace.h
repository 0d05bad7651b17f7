// Device memory for one call, as one allocation that the caller makes: torch's caching allocator knows the stream, and the pools of
// captured graphs, which this module does not.
#pragma once
#include "../../module/arguments.h"

namespace halfstep {

class Workspace {
 public:
  // Room for `count` items; the offset to pass to at().
  template <class Item>
  size_t add(size_t count) {
    const size_t offset = bytes_;
    bytes_ += (count * sizeof(Item) + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }

  // allocate(bytes) returns an address; the caller keeps the memory alive until the stream is done with it, as torch's
  // allocator does by itself. Called with the GIL held.
  void allocate(const py::function& allocate) {
    base_ = allocate(bytes_).cast<uint64_t>();
    if (base_ % kAlignment) refuse("the workspace is not aligned to " + std::to_string(kAlignment) + " bytes");
  }

  template <class Item>
  Item* at(size_t offset) const {
    return pointer<Item>(base_ + offset);
  }

 private:
  static constexpr size_t kAlignment = 16;
  size_t bytes_ = 0;
  uint64_t base_ = 0;
};

}  // namespace halfstep
