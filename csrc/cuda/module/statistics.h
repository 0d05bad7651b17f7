// A first pass over a list, with the memory its blocks leave their results in.
#pragma once
#include "../multi_tensor.h"
#include "workspace.h"

namespace halfstep {

class StatsPass {
 public:
  // squares: false where only non-finite values are looked for, by blocks of `elements`.
  StatsPass(Workspace& workspace, const std::vector<TensorRef>& tensors, int64_t elements, bool squares)
      : tensors_(static_cast<int32_t>(tensors.size())), chunks_(chunks_of(tensors, elements)), squares_(squares) {
    const auto chunks = static_cast<size_t>(chunks_);
    tensor_ = workspace.add<int32_t>(chunks);
    if (!squares) return;
    sums_ = workspace.add<double>(chunks);
    tensor_sums_ = workspace.add<double>(tensors.size());
  }

  // Once the workspace is allocated.
  Stats stats(const Workspace& workspace) const {
    Stats s;
    s.passed = true;
    s.squares = squares_;
    s.chunks.tensor = workspace.at<int32_t>(tensor_);
    s.chunk_count = chunks_;
    s.tensor_count = tensors_;
    if (!squares_) return s;
    s.chunks.sum_squares = workspace.at<double>(sums_);
    s.tensor_sums = workspace.at<double>(tensor_sums_);
    return s;
  }

 private:
  int32_t tensors_, chunks_;
  bool squares_;
  size_t tensor_ = 0, sums_ = 0, tensor_sums_ = 0;
};

// Where the results of a pass over a list go: 0 = not wanted.
struct StatsAddresses {
  uint64_t tensor_sums, sum_squares, first_nonfinite;
};

inline void run_grad_stats(const std::vector<TensorRef>& tensors, uint64_t scale, const StatsAddresses& out,
                           const py::function& allocate, const Queue& queue) {
  Workspace workspace;
  const StatsPass pass(workspace, tensors, kChunk, true);
  workspace.allocate(allocate);
  Stats stats = pass.stats(workspace);
  if (out.tensor_sums) stats.tensor_sums = pointer<double>(out.tensor_sums);
  stats.sum_squares = pointer<double>(out.sum_squares);
  stats.first_nonfinite = pointer<int64_t>(out.first_nonfinite);
  const py::gil_scoped_release nogil;
  const DeviceGuard guard(queue.device);
  grad_stats(tensors, pointer<const float>(scale), stats.chunks, queue);
  prologue({}, {}, stats, {}, {}, queue);
}

}  // namespace halfstep
