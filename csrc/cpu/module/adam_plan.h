// The fused step of one optimizer on the CPU, as Python holds it.
#pragma once
#include <memory>

#include "../../module/adam_rows.h"
#include "run.h"

namespace halfstep {

class AdamPlan : public AdamRows {
 public:
  using AdamRows::AdamRows;

  std::pair<double, int64_t> stats(double factor, int threads, const std::string& isa) const {
    check_ready();
    const Run run = run_with(threads, isa);
    const auto nogil = unlocked();
    const GradStats s = grad_stats(grads(), rounded(factor), run);
    return {s.sum_squares, s.first_nonfinite};
  }

  int64_t update(const std::vector<Group>& groups, double grad_factor, uint32_t seed, bool stochastic_weight, bool heal,
                 int threads, const std::string& isa) const {
    check_ready();
    const std::vector<AdamGroup> all = checked(groups);
    const Run run = run_with(threads, isa);
    const auto nogil = unlocked();
    return adam(rows(), all, {rounded(grad_factor), seed, stochastic_weight, heal}, run);
  }

 private:
  // So little work that keeping Python's lock costs nobody anything.
  bool small() const { return elements() <= kSmall; }

  std::unique_ptr<py::gil_scoped_release> unlocked() const {
    return small() ? nullptr : std::make_unique<py::gil_scoped_release>();
  }

  static constexpr int64_t kSmall = 1 << 17;  // elements: a tenth of a millisecond
};

}  // namespace halfstep
