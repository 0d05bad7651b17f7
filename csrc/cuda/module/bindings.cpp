// The Python module halfstep._cuda: device addresses, sizes and dtype codes in; results are written on the device, behind the work
// that is on the stream already. Torch-free: ops/ owns what raw pointers lose (lifetimes, layouts, version counters, streams).
#include "../../module/bind_tensors.h"
#include "../../module/tensor_list.h"
#include "adam_plan.h"

#if defined(HALFSTEP_EMULATED)
#include "../../emulation/controls.h"
#endif

namespace halfstep {
namespace {

// Either three columns or a list that is read already.
template <class... Rest>
void def_with_lists(py::module_& m, const char* name, void (*run)(const std::vector<TensorRef>&, Rest...)) {
  m.def(name, [run](const Addresses& data, const Integers& numel, const Integers& dtype, Rest... rest) {
    run(tensors(data, numel, dtype), rest...);
  });
  m.def(name, [run](const TensorList& list, Rest... rest) { run(list.refs(), rest...); });
}

void bind_stats(const std::vector<TensorRef>& list, uint64_t scale, uint64_t tensor_sums, uint64_t sum_squares,
                uint64_t first_nonfinite, const py::function& allocate, int device, uint64_t stream) {
  run_grad_stats(list, scale, {tensor_sums, sum_squares, first_nonfinite}, allocate, {device, stream});
}

void bind_scale(const std::vector<TensorRef>& list, uint64_t factor, uint64_t first_nonfinite,
                const py::function& allocate, int device, uint64_t stream) {
  if (!factor || !first_nonfinite) refuse("scale_ needs a factor and memory for its result");
  Workspace workspace;
  const StatsPass pass(workspace, list, kBlockElements, false);
  workspace.allocate(allocate);
  Stats stats = pass.stats(workspace);
  stats.first_nonfinite = pointer<int64_t>(first_nonfinite);
  const Queue queue{device, stream};
  const py::gil_scoped_release nogil;
  const DeviceGuard guard(device);
  scale(list, pointer<const float>(factor), stats.chunks, queue);
  prologue({}, {}, stats, {}, {}, queue);
}

void run_cast(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, bool stochastic, uint32_t seed,
              int device, uint64_t stream) {
  const py::gil_scoped_release nogil;
  const DeviceGuard guard(device);
  cast(dst, src, stochastic, seed, {device, stream});
}

void run_accumulate(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, int device, uint64_t stream) {
  for (const TensorRef& t : dst)
    if (t.dtype != Dtype::f32) refuse("accumulate_ adds to float32 tensors only");
  const py::gil_scoped_release nogil;
  const DeviceGuard guard(device);
  accumulate(dst, src, {device, stream});
}

template <class... Rest>
void def_with_pairs(py::module_& m, const char* name,
                    void (*run)(const std::vector<TensorRef>&, const std::vector<TensorRef>&, Rest...)) {
  m.def(name, [run](const Addresses& dst, const Integers& dst_dtype, const Addresses& src, const Integers& src_dtype,
                    const Integers& numel, Rest... rest) {
    check_length("src", src.size(), dst.size());
    run(tensors(dst, numel, dst_dtype), tensors(src, numel, src_dtype), rest...);
  });
  m.def(name, [run](const TensorList& dst, const TensorList& src, Rest... rest) {
    if (!dst.has_shapes_of(src)) refuse("the lists of a call have different shapes");
    run(dst.refs(), src.refs(), rest...);
  });
}

int device_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "looking for CUDA devices");
  return count;
}

void bind_plan(py::module_& m) {
  using py::arg;
  bind_rows(py::class_<AdamPlan>(m, "AdamPlan", py::module_local()))
      .def("grad_stats", &AdamPlan::stats, arg("scale"), arg("sum_squares"), arg("first_nonfinite"), arg("allocate"),
           arg("device"), arg("stream"))
      .def(
          "run",
          [](const AdamPlan& plan, const std::vector<Group>& groups, const std::vector<DeviceRate>& rates,
             const std::array<uint64_t, 8>& at, double max_norm, bool skip_nonfinite, uint32_t seed,
             bool stochastic_weight, bool heal, bool with_stats, const py::function& allocate, int device,
             uint64_t stream) {
            plan.run(groups, rates, {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]},
                     {max_norm, skip_nonfinite, stochastic_weight, heal, seed}, with_stats, allocate, {device, stream});
          },
          "addresses: scale, found_inf, sum_squares, given_first; norm, skipped, healed, first_nonfinite, 8 bytes each",
          arg("groups"), arg("rates"), arg("addresses"), arg("max_norm"), arg("skip_nonfinite"), arg("seed"),
          arg("stochastic_weight"), arg("heal"), arg("with_stats"), arg("allocate"), arg("device"), arg("stream"));
}

}  // namespace
}  // namespace halfstep

PYBIND11_MODULE(HALFSTEP_MODULE_NAME, m) {
  using namespace halfstep;
  m.doc() = "halfstep's CUDA kernels. Call them through halfstep.ops.";
  m.attr("archs") = HALFSTEP_ARCHS;
  m.def("device_count", &device_count, "How many devices there are; RuntimeError says why none can be used.");
  bind_tensors(m);
  bind_plan(m);
  def_with_lists(m, "grad_stats", &bind_stats);
  def_with_lists(m, "scale_", &bind_scale);
  def_with_pairs(m, "cast_", &run_cast);
  def_with_pairs(m, "accumulate_", &run_accumulate);
#if defined(HALFSTEP_EMULATED)
  bind_emulation(m);
#endif
}
