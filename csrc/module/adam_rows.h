// The table of one optimizer's fused step, as Python holds it: rows, gradients, and whether they still are where they were. Each
// backend's AdamPlan adds how it is run.
#pragma once
#include <algorithm>
#include <memory>

#include "arguments.h"
#include "watch.h"

namespace halfstep {

// A plan is made anew when a tensor moves; gradients come with every step.
class AdamRows {
 public:
  AdamRows(const Integers& numel, const Integers& first_index, const Integers& param_id, const Integers& group,
           const Integers& param_dtype, const Integers& state_dtype)
      : rows_(numel.size()) {
    check_length("first_index", first_index.size(), rows_.size());
    check_length("param_id", param_id.size(), rows_.size());
    check_length("group", group.size(), rows_.size());
    check_length("param_dtype", param_dtype.size(), rows_.size());
    check_length("state_dtype", state_dtype.size(), rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (numel[i] < 0 || first_index[i] < 0 || param_id[i] < 0 || group[i] < 0)
        refuse("row " + std::to_string(i) + " has a negative size, index, id or group");
      rows_[i].numel = numel[i];
      rows_[i].first_index = first_index[i];
      rows_[i].param_id = static_cast<uint32_t>(param_id[i]);
      rows_[i].group = static_cast<int32_t>(group[i]);
      rows_[i].param_dtype = dtype_from(param_dtype[i]);
      rows_[i].state_dtype = dtype_from(state_dtype[i]);
      elements_ += numel[i];
      groups_needed_ = std::max(groups_needed_, static_cast<size_t>(group[i]) + 1);
    }
  }

  // Address 0 = the row has no such tensor (master, remainder, max_exp_avg_sq).
  void set_tensors(const Addresses& param, const Addresses& exp_avg, const Addresses& exp_avg_sq,
                   const Addresses& max_exp_avg_sq, const Addresses& master, const Addresses& remainder,
                   const Addresses& step) {
    check_length("param", param.size(), rows_.size());
    check_length("exp_avg", exp_avg.size(), rows_.size());
    check_length("exp_avg_sq", exp_avg_sq.size(), rows_.size());
    check_length("max_exp_avg_sq", max_exp_avg_sq.size(), rows_.size());
    check_length("master", master.size(), rows_.size());
    check_length("remainder", remainder.size(), rows_.size());
    check_length("step", step.size(), rows_.size());
    ready_ = false;
    for (size_t i = 0; i < rows_.size(); ++i) {
      AdamRow& r = rows_[i];
      const std::string row = "row " + std::to_string(i);
      if (r.numel > 0 && (!param[i] || !exp_avg[i] || !exp_avg_sq[i]))
        refuse(row + " lacks param, exp_avg or exp_avg_sq");
      if (!step[i]) refuse(row + " lacks a step counter");
      if (master[i] && remainder[i]) refuse(row + " has both a master and a remainder");
      if (master[i] && r.param_dtype == Dtype::f32) refuse(row + " has a master for a float32 param");
      if (remainder[i] && r.param_dtype != Dtype::bf16)
        refuse(row + " has a remainder for a param that is not bfloat16");
      r.param = pointer<void>(param[i]);
      r.exp_avg = pointer<void>(exp_avg[i]);
      r.exp_avg_sq = pointer<void>(exp_avg_sq[i]);
      r.max_exp_avg_sq = pointer<void>(max_exp_avg_sq[i]);
      r.master = pointer<float>(master[i]);
      r.remainder = pointer<int16_t>(remainder[i]);
      r.step = pointer<int64_t>(step[i]);
    }
    ready_ = true;
    grads_.clear();
  }

  void set_grads(const Addresses& grad, const Integers& dtype) {
    if (!ready_) refuse("set_tensors comes before set_grads");
    check_length("grad", grad.size(), rows_.size());
    Integers numel(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) numel[i] = rows_[i].numel;
    take(tensors(grad, numel, dtype));
  }

  // From here on, read() finds the gradients by itself: see ParamWatch.
  void watch(const TensorReader& reader, const py::list& params, const Integers& row) {
    const DropsPythonErrors errors;
    watch_ = ParamWatch(reader, params, row, rows_.size());
    kept_ = std::make_unique<KeptTensors>(reader);
  }

  // This step's gradients, straight from the parameters; false if that needs a closer look, and set_grads().
  // Their parameters are marked as written in place.
  bool read(const TensorReader& reader, const py::list& params) {
    const DropsPythonErrors errors;
    drop_grads();
    std::vector<TensorRef> grads;
    if (!ready_ || !kept_ || !watch_.read(reader, params, grads, *kept_) || !fit(grads)) {
      drop_grads();  // those of the parameters before the one that has changed
      return false;
    }
    take(std::move(grads));
    return true;
  }

  // Where the gradients are, and their dtype codes, for who launches kernels from Python; None if the last call said the same.
  py::object moved_grads() {
    Addresses where(grads_.size());
    Integers codes(grads_.size());
    for (size_t i = 0; i < grads_.size(); ++i) {
      where[i] = reinterpret_cast<uintptr_t>(grads_[i].data);
      codes[i] = static_cast<int64_t>(grads_[i].dtype);
    }
    if (where == told_where_ && codes == told_codes_) return py::none();
    told_where_ = where;
    told_codes_ = codes;
    return py::make_tuple(std::move(where), std::move(codes));
  }

  // Lets go of the gradients; the next step brings its own.
  void drop_grads() {
    grads_.clear();
    if (kept_) kept_->drop();
  }

 protected:
  const std::vector<AdamRow>& rows() const { return rows_; }
  const std::vector<TensorRef>& grads() const { return grads_; }
  int64_t elements() const { return elements_; }

  void check_ready() const {
    if (!ready_ || grads_.size() != rows_.size()) refuse("set_tensors and set_grads come before a step");
  }

  std::vector<AdamGroup> checked(const std::vector<Group>& groups) const {
    if (groups.size() < groups_needed_)
      refuse("got " + std::to_string(groups.size()) + " groups, the rows need " + std::to_string(groups_needed_));
    std::vector<AdamGroup> all;
    for (const Group& g : groups) all.push_back(group_from(g));
    return all;
  }

 private:
  bool fit(const std::vector<TensorRef>& grads) const {
    return std::equal(grads.begin(), grads.end(), rows_.begin(), rows_.end(),
                      [](const TensorRef& grad, const AdamRow& row) { return grad.numel == row.numel; });
  }

  void take(std::vector<TensorRef> grads) {
    grads_ = std::move(grads);
    for (size_t i = 0; i < rows_.size(); ++i) {
      rows_[i].grad = grads_[i].data;
      rows_[i].grad_dtype = grads_[i].dtype;
    }
  }

  std::vector<AdamRow> rows_;
  std::vector<TensorRef> grads_;
  std::unique_ptr<KeptTensors> kept_;  // gradients, from read() to the end of the step
  ParamWatch watch_;
  Addresses told_where_;  // what moved_grads() said last
  Integers told_codes_;
  int64_t elements_ = 0;
  size_t groups_needed_ = 0;
  bool ready_ = false;
};

}  // namespace halfstep
