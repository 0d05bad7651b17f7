// The Python module halfstep._cpu: integers in (addresses, sizes, dtype codes), numbers out. Torch-free: ops/ owns what raw
// pointers lose (lifetimes, layouts, version counters). Sizes, codes and list lengths are checked here all the same: a
// caller's mistake must be an exception, never an access out of bounds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ieee_mode.h"
#include "isa.h"
#include "multi_tensor.h"

namespace py = pybind11;

namespace halfstep {
namespace {

using Addresses = std::vector<uint64_t>;
using Integers = std::vector<int64_t>;
using Group = std::tuple<double, double, double, double, double, bool, bool>;  // AdamGroup's fields, in order

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("halfstep._cpu: " + what); }

void check_length(const char* name, size_t got, size_t expected) {
  if (got != expected)
    refuse(std::string(name) + " has " + std::to_string(got) + " entries, expected " + std::to_string(expected));
}

Dtype dtype_from(int64_t code) {
  if (code < 0 || code >= kDtypes)
    refuse("dtype code " + std::to_string(code) + " is not 0 (f32), 1 (bf16) or 2 (f16)");
  return static_cast<Dtype>(code);
}

// Factors arrive as double and are rounded here: on a thread that flushes denormals, pybind11's own conversion to float
// would make a tiny one 0.
float rounded(double value) {
  const IeeeMode mode;
  return pinned(static_cast<float>(pinned(value)));
}

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

std::vector<TensorRef> tensors(const Addresses& data, const Integers& numel, const Integers& dtype) {
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

Run run_with(int threads, const std::string& isa) {
  if (threads < 1) refuse("threads must be at least 1, got " + std::to_string(threads));
  return {threads, kernels_for(isa)};
}

AdamGroup group_from(const Group& g) {
  return {std::get<0>(g), std::get<1>(g), std::get<2>(g), std::get<3>(g),
          std::get<4>(g), std::get<5>(g), std::get<6>(g)};
}

// The table of one optimizer's fused step. A plan is made anew when a tensor moves; gradients come with every step.
class AdamPlan {
 public:
  AdamPlan(const Integers& numel, const Integers& first_index, const Integers& param_id, const Integers& group,
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
    grads_ = tensors(grad, numel, dtype);
    for (size_t i = 0; i < rows_.size(); ++i) {
      rows_[i].grad = grads_[i].data;
      rows_[i].grad_dtype = grads_[i].dtype;
    }
  }

  std::pair<double, int64_t> stats(double factor, int threads, const std::string& isa) const {
    check_ready();
    const Run run = run_with(threads, isa);
    const py::gil_scoped_release nogil;
    const GradStats s = grad_stats(grads_, rounded(factor), run);
    return {s.sum_squares, s.first_nonfinite};
  }

  int64_t update(const std::vector<Group>& groups, double grad_factor, uint32_t seed, bool stochastic_weight, bool heal,
                 int threads, const std::string& isa) const {
    check_ready();
    if (groups.size() < groups_needed_)
      refuse("got " + std::to_string(groups.size()) + " groups, the rows need " + std::to_string(groups_needed_));
    std::vector<AdamGroup> all;
    for (const Group& g : groups) all.push_back(group_from(g));
    const Run run = run_with(threads, isa);
    const py::gil_scoped_release nogil;
    return adam(rows_, all, {rounded(grad_factor), seed, stochastic_weight, heal}, run);
  }

 private:
  void check_ready() const {
    if (!ready_ || grads_.size() != rows_.size()) refuse("set_tensors and set_grads come before a step");
  }

  std::vector<AdamRow> rows_;
  std::vector<TensorRef> grads_;
  size_t groups_needed_ = 0;
  bool ready_ = false;
};

std::pair<double, int64_t> bind_grad_stats(const Addresses& grad, const Integers& numel, const Integers& dtype,
                                           double factor, int threads, const std::string& isa) {
  const std::vector<TensorRef> grads = tensors(grad, numel, dtype);
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  const GradStats s = grad_stats(grads, rounded(factor), run);
  return {s.sum_squares, s.first_nonfinite};
}

int64_t bind_scale(const Addresses& data, const Integers& numel, const Integers& dtype, double factor, int threads,
                   const std::string& isa) {
  const std::vector<TensorRef> list = tensors(data, numel, dtype);
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  return scale(list, rounded(factor), run);
}

void bind_cast(const Addresses& dst, const Integers& dst_dtype, const Addresses& src, const Integers& src_dtype,
               const Integers& numel, bool stochastic, uint32_t seed, int threads, const std::string& isa) {
  check_length("src", src.size(), dst.size());
  const std::vector<TensorRef> to = tensors(dst, numel, dst_dtype), from = tensors(src, numel, src_dtype);
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  cast(to, from, stochastic, seed, run);
}

py::tuple bind_decide(double sum_squares, float scale, double max_norm, bool nonfinite, bool skip_nonfinite,
                      bool found_inf) {
  const IeeeMode mode;
  const StepDecision d =
      decide({pinned(sum_squares), pinned(scale), pinned(max_norm), nonfinite, skip_nonfinite, found_inf});
  return py::make_tuple(d.norm, static_cast<double>(d.grad_factor), d.skip);
}

double bind_inverse(float scale) {
  const IeeeMode mode;
  return pinned(static_cast<double>(inverse(pinned(scale))));
}

py::tuple bind_scalars(const Group& group, int64_t t) {
  const IeeeMode mode;
  const AdamScalars s = adam_scalars(group_from(group), t);
  std::vector<double> fields = {s.beta1,        s.one_minus_beta1, s.beta2,     s.one_minus_beta2,      s.eps,
                                s.weight_decay, s.decay,           s.step_size, s.sqrt_bias_correction2};
  return py::tuple(py::cast(fields));
}

void bind_probe(uint64_t p, uint64_t g, uint64_t m, uint64_t v, int64_t n, int threads, const std::string& isa) {
  if (n < 0 || (n > 0 && (!p || !g || !m || !v))) refuse("probe needs four float32 buffers");
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  probe(pointer<float>(p), pointer<float>(g), pointer<float>(m), pointer<float>(v), n, run);
}

}  // namespace
}  // namespace halfstep

PYBIND11_MODULE(_cpu, m) {
  using namespace halfstep;
  using py::arg;
  m.doc() =
      "halfstep's CPU kernels: SIMD chosen at run time, torch's own OpenMP threads. Call them through halfstep.ops.";
  m.def("compiled_isas", &compiled_isas, "Instruction sets this build has code for, plainest first.");
  m.def("supported_isas", &supported_isas, "Of those, the ones this machine runs; the last is the default.");
  m.def("grad_stats", &bind_grad_stats, arg("grad"), arg("numel"), arg("dtype"), arg("factor"), arg("threads"),
        arg("isa"));
  m.def("scale_", &bind_scale, arg("data"), arg("numel"), arg("dtype"), arg("factor"), arg("threads"), arg("isa"));
  m.def("cast_", &bind_cast, arg("dst"), arg("dst_dtype"), arg("src"), arg("src_dtype"), arg("numel"),
        arg("stochastic"), arg("seed"), arg("threads"), arg("isa"));
  m.def("decide", &bind_decide, arg("sum_squares"), arg("scale"), arg("max_norm"), arg("nonfinite"),
        arg("skip_nonfinite"), arg("found_inf"));
  m.def("inverse", &bind_inverse, arg("scale"));
  m.def("adam_scalars", &bind_scalars, arg("group"), arg("t"));
  m.def("probe_", &bind_probe, arg("p"), arg("g"), arg("m"), arg("v"), arg("n"), arg("threads"), arg("isa"));
  py::class_<AdamPlan>(m, "AdamPlan")
      .def(py::init<const Integers&, const Integers&, const Integers&, const Integers&, const Integers&,
                    const Integers&>(),
           arg("numel"), arg("first_index"), arg("param_id"), arg("group"), arg("param_dtype"), arg("state_dtype"))
      .def("set_tensors", &AdamPlan::set_tensors, arg("param"), arg("exp_avg"), arg("exp_avg_sq"),
           arg("max_exp_avg_sq"), arg("master"), arg("remainder"), arg("step"))
      .def("set_grads", &AdamPlan::set_grads, arg("grad"), arg("dtype"))
      .def("grad_stats", &AdamPlan::stats, arg("factor"), arg("threads"), arg("isa"))
      .def("update", &AdamPlan::update, arg("groups"), arg("grad_factor"), arg("seed"), arg("stochastic_weight"),
           arg("heal"), arg("threads"), arg("isa"));
}
