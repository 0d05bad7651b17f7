// The Python module halfstep._cpu: integers in (addresses, sizes, dtype codes), numbers out. Torch-free: ops/ owns what raw
// pointers lose (lifetimes, layouts, version counters). Sizes, codes and list lengths are checked here all the same: a
// caller's mistake must be an exception, never an access out of bounds.
#include "../../module/bind_tensors.h"
#include "../../module/tensor_list.h"
#include "adam_plan.h"
#include "run.h"

namespace halfstep {
namespace {

std::pair<double, int64_t> run_grad_stats(const std::vector<TensorRef>& grads, double factor, int threads,
                                          const std::string& isa) {
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  const GradStats s = grad_stats(grads, rounded(factor), run);
  return {s.sum_squares, s.first_nonfinite};
}

// `sums`: the address of `room` numbers, which must be as many as there are tensors.
double run_sums_of_squares(const std::vector<TensorRef>& list, uint64_t sums, int64_t room, int threads,
                           const std::string& isa) {
  if (room < 0) refuse("sums has a negative size");
  check_length("sums", static_cast<size_t>(room), list.size());
  if (room > 0 && !sums) refuse("sums has no storage");
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  return grad_stats(list, 1.0f, run, pointer<double>(sums)).sum_squares;
}

int64_t run_scale(const std::vector<TensorRef>& list, double factor, int threads, const std::string& isa) {
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  return scale(list, rounded(factor), run);
}

void run_cast(const std::vector<TensorRef>& to, const std::vector<TensorRef>& from, bool stochastic, uint32_t seed,
              int threads, const std::string& isa) {
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  cast(to, from, stochastic, seed, run);
}

void run_accumulate(const std::vector<TensorRef>& to, const std::vector<TensorRef>& from, int threads,
                    const std::string& isa) {
  for (const TensorRef& t : to)
    if (t.dtype != Dtype::f32) refuse("accumulate_ adds to float32 tensors only");
  const Run run = run_with(threads, isa);
  const py::gil_scoped_release nogil;
  accumulate(to, from, run);
}

std::pair<double, int64_t> bind_grad_stats(const Addresses& grad, const Integers& numel, const Integers& dtype,
                                           double factor, int threads, const std::string& isa) {
  return run_grad_stats(tensors(grad, numel, dtype), factor, threads, isa);
}

double bind_sums_of_squares(const Addresses& data, const Integers& numel, const Integers& dtype, uint64_t sums,
                            int64_t room, int threads, const std::string& isa) {
  return run_sums_of_squares(tensors(data, numel, dtype), sums, room, threads, isa);
}

int64_t bind_scale(const Addresses& data, const Integers& numel, const Integers& dtype, double factor, int threads,
                   const std::string& isa) {
  return run_scale(tensors(data, numel, dtype), factor, threads, isa);
}

void bind_cast(const Addresses& dst, const Integers& dst_dtype, const Addresses& src, const Integers& src_dtype,
               const Integers& numel, bool stochastic, uint32_t seed, int threads, const std::string& isa) {
  check_length("src", src.size(), dst.size());
  run_cast(tensors(dst, numel, dst_dtype), tensors(src, numel, src_dtype), stochastic, seed, threads, isa);
}

void bind_accumulate(const Addresses& dst, const Integers& dst_dtype, const Addresses& src, const Integers& src_dtype,
                     const Integers& numel, int threads, const std::string& isa) {
  check_length("src", src.size(), dst.size());
  run_accumulate(tensors(dst, numel, dst_dtype), tensors(src, numel, src_dtype), threads, isa);
}

// The same of lists that are read already.
std::pair<double, int64_t> bind_list_grad_stats(const TensorList& grads, double factor, int threads,
                                                const std::string& isa) {
  return run_grad_stats(grads.refs(), factor, threads, isa);
}

double bind_list_sums_of_squares(const TensorList& list, uint64_t sums, int64_t room, int threads,
                                 const std::string& isa) {
  return run_sums_of_squares(list.refs(), sums, room, threads, isa);
}

int64_t bind_list_scale(const TensorList& list, double factor, int threads, const std::string& isa) {
  return run_scale(list.refs(), factor, threads, isa);
}

void bind_list_cast(const TensorList& dst, const TensorList& src, bool stochastic, uint32_t seed, int threads,
                    const std::string& isa) {
  if (!dst.has_shapes_of(src)) refuse("the lists of cast_ have different shapes");
  run_cast(dst.refs(), src.refs(), stochastic, seed, threads, isa);
}

void bind_list_accumulate(const TensorList& dst, const TensorList& src, int threads, const std::string& isa) {
  if (!dst.has_shapes_of(src)) refuse("the lists of accumulate_ have different shapes");
  run_accumulate(dst.refs(), src.refs(), threads, isa);
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
  m.def("sums_of_squares", &bind_sums_of_squares, arg("data"), arg("numel"), arg("dtype"), arg("sums"), arg("room"),
        arg("threads"), arg("isa"));
  m.def("accumulate_", &bind_accumulate, arg("dst"), arg("dst_dtype"), arg("src"), arg("src_dtype"), arg("numel"),
        arg("threads"), arg("isa"));
  m.def("decide", &bind_decide, arg("sum_squares"), arg("scale"), arg("max_norm"), arg("nonfinite"),
        arg("skip_nonfinite"), arg("found_inf"));
  m.def("inverse", &bind_inverse, arg("scale"));
  m.def("adam_scalars", &bind_scalars, arg("group"), arg("t"));
  m.def("probe_", &bind_probe, arg("p"), arg("g"), arg("m"), arg("v"), arg("n"), arg("threads"), arg("isa"));
  bind_tensors(m);
  m.def("grad_stats", &bind_list_grad_stats, arg("grad"), arg("factor"), arg("threads"), arg("isa"));
  m.def("scale_", &bind_list_scale, arg("data"), arg("factor"), arg("threads"), arg("isa"));
  m.def("cast_", &bind_list_cast, arg("dst"), arg("src"), arg("stochastic"), arg("seed"), arg("threads"), arg("isa"));
  m.def("sums_of_squares", &bind_list_sums_of_squares, arg("data"), arg("sums"), arg("room"), arg("threads"),
        arg("isa"));
  m.def("accumulate_", &bind_list_accumulate, arg("dst"), arg("src"), arg("threads"), arg("isa"));
  bind_rows(py::class_<AdamPlan>(m, "AdamPlan", py::module_local()))
      .def("grad_stats", &AdamPlan::stats, arg("factor"), arg("threads"), arg("isa"))
      .def("update", &AdamPlan::update, arg("groups"), arg("grad_factor"), arg("seed"), arg("stochastic_weight"),
           arg("heal"), arg("threads"), arg("isa"))
      .def("moved_grads", &AdamPlan::moved_grads);
}
