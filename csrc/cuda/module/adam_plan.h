// The fused step of one optimizer's parameters on one CUDA device, as Python holds it.
#pragma once
#include "../../module/adam_rows.h"
#include "statistics.h"

namespace halfstep {

// A group's learning rate that lies on the device: (group, address, float64 instead of float32).
using DeviceRate = std::tuple<size_t, uint64_t, bool>;

// What a step is given from the device (0 = nothing) and where its results go.
struct StepAddresses {
  uint64_t scale, found_inf;              // read
  uint64_t sum_squares, first_nonfinite;  // read, or with the step's own first pass first_nonfinite is written
  uint64_t norm, skipped, healed;         // written
};

class AdamPlan : public AdamRows {
 public:
  using AdamRows::AdamRows;

  void stats(uint64_t scale, uint64_t sum_squares, uint64_t first_nonfinite, const py::function& allocate, int device,
             uint64_t stream) const {
    check_ready();
    run_grad_stats(grads(), scale, {0, sum_squares, first_nonfinite}, allocate, {device, stream});
  }

  // The first pass if `with_stats`, then the prologue and the update.
  void run(const std::vector<Group>& groups, const std::vector<DeviceRate>& rates, const StepAddresses& at,
           const StepOptions& options, bool with_stats, const py::function& allocate, const Queue& queue) const {
    check_ready();
    if (!at.norm || !at.skipped || !at.healed) refuse("a step needs memory for norm, skipped and healed");
    const std::vector<DeviceGroup> all = on_device(checked(groups), rates);
    Workspace workspace;
    const size_t decision = workspace.add<Decision>(1), records = workspace.add<StepRecord>(rows().size());
    std::unique_ptr<StatsPass> pass;
    if (with_stats) pass = std::make_unique<StatsPass>(workspace, grads(), kChunk, true);
    workspace.allocate(allocate);
    Stats stats;
    if (pass) stats = pass->stats(workspace);
    if (!pass) stats.sum_squares = pointer<double>(at.sum_squares);
    stats.first_nonfinite = pointer<int64_t>(at.first_nonfinite);
    const StepPointers step{
        pointer<const float>(at.scale),   pointer<const float>(at.found_inf),     pointer<double>(at.norm),
        pointer<bool>(at.skipped),        pointer<unsigned long long>(at.healed), workspace.at<Decision>(decision),
        workspace.at<StepRecord>(records)};
    const py::gil_scoped_release nogil;
    const DeviceGuard guard(queue.device);
    if (pass) grad_stats(grads(), step.scale, stats.chunks, queue);
    prologue(rows(), all, stats, step, options, queue);
    update(rows(), step, options, queue);
  }

 private:
  static std::vector<DeviceGroup> on_device(const std::vector<AdamGroup>& groups,
                                            const std::vector<DeviceRate>& rates) {
    std::vector<DeviceGroup> all;
    for (const AdamGroup& group : groups) all.push_back({group, nullptr, false});
    for (const auto& [index, address, is_double] : rates) {
      if (index >= all.size() || !address) refuse("a learning rate of no group, or without memory");
      all[index].lr = pointer<const void>(address);
      all[index].lr_is_double = is_double;
    }
    return all;
  }
};

}  // namespace halfstep
