// The fused step of one optimizer's parameters on one CUDA device, as Python holds it.
#pragma once
#include "../../module/adam_rows.h"
#include "statistics.h"

namespace halfstep {

// A group's learning rate that lies on the device: (group, address, float64 instead of float32).
using DeviceRate = std::tuple<size_t, uint64_t, bool>;

// What a step is given from the device (0 = nothing) and where its results go.
struct StepAddresses {
  uint64_t scale, found_inf, sum_squares,
      given_first;                                  // read; the last two not where the step has a first pass of its own
  uint64_t norm, skipped, healed, first_nonfinite;  // written, a word of 8 bytes each
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
    if (!at.norm || !at.skipped || !at.healed || !at.first_nonfinite)
      refuse("a step needs memory for norm, skipped, healed and first_nonfinite");
    const std::vector<DeviceGroup> all = on_device(checked(groups), rates);
    Workspace workspace;
    const size_t decision = workspace.add<Decision>(1), records = workspace.add<StepRecord>(rows().size());
    std::unique_ptr<StatsPass> pass;
    if (with_stats) pass = std::make_unique<StatsPass>(workspace, grads(), kChunk, true);
    workspace.allocate(allocate);
    Stats stats;
    if (pass) stats = pass->stats(workspace);
    stats.given_sum_squares = pointer<const double>(at.sum_squares);
    stats.given_first_nonfinite = pointer<const int64_t>(at.given_first);
    stats.first_nonfinite = pointer<int64_t>(at.first_nonfinite);
    const StepPointers step{
        pointer<const float>(at.scale),   pointer<const float>(at.found_inf),     pointer<double>(at.norm),
        pointer<int64_t>(at.skipped),     pointer<unsigned long long>(at.healed), workspace.at<Decision>(decision),
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
