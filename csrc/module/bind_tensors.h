// What every native module offers Python to look at tensors, and the methods of AdamPlan that are the same on all of them.
#pragma once
#include "adam_rows.h"
#include "tensor_list.h"
#include "tensor_reader.h"

namespace halfstep {

// (address, torch's number of the dtype, sizes), or None for what cannot be read.
inline py::object bind_facts(const TensorReader& reader, py::handle tensor) {
  const DropsPythonErrors errors;
  TensorFacts facts;
  const TensorReader::Handle handle = reader.tensor(tensor.ptr());
  if (!handle || !reader.read(handle, facts)) return py::none();
  const std::vector<int64_t> sizes(facts.sizes, facts.sizes + facts.dims);
  return py::make_tuple(reinterpret_cast<uintptr_t>(facts.data), facts.dtype, sizes);
}

// The address of the implementation of the tensor's gradient (its ._cdata), 0 if it has none.
inline uint64_t bind_grad(const TensorReader& reader, py::handle tensor) {
  const TensorReader::Handle handle = reader.tensor(tensor.ptr());
  if (!handle) refuse("expected a torch.Tensor or Parameter");
  const TensorReader::Handle grad = reader.grad(handle);
  return reader.is_defined(grad) ? *static_cast<const uintptr_t*>(grad) : 0;
}

inline bool bind_bump_version(const TensorReader& reader, py::handle tensor) {
  const TensorReader::Handle handle = reader.tensor(tensor.ptr());
  if (!handle) refuse("expected a torch.Tensor or Parameter");
  return reader.bump_version(handle);
}

inline void bind_tensors(py::module_& m) {
  using py::arg;
  py::class_<TensorReader>(m, "TensorReader", py::module_local())
      .def(py::init([](const std::string& folder, const std::string& device_type, py::handle tensor_type,
                       py::handle parameter_type, py::handle probe, uint64_t implementation) {
             return TensorReader(folder, device_type, tensor_type.ptr(), parameter_type.ptr(), probe.ptr(),
                                 implementation);
           }),
           arg("folder"), arg("device_type"), arg("tensor_type"), arg("parameter_type"), arg("probe"),
           arg("implementation"))
      .def("facts", &bind_facts, arg("tensor"))
      .def("grad", &bind_grad, arg("tensor"))
      .def("bump_version", &bind_bump_version, arg("tensor"));
  py::class_<TensorList>(m, "TensorList", py::module_local())
      .def("has_shapes_of", &TensorList::has_shapes_of, arg("other"))
      .def("are_float32", &TensorList::are_float32)
      .def("columns", &TensorList::columns)
      .def("key", &TensorList::key)
      .def("apart", &TensorList::apart, arg("source") = nullptr);
  m.def("read_list", &TensorList::read, arg("reader"), arg("tensors"));
  py::class_<StateWatch>(m, "StateWatch", py::module_local())
      .def(py::init<const TensorReader&, const py::list&>(), arg("reader"), arg("states"))
      .def("still", &StateWatch::still, arg("reader"), arg("states"));
}

template <class Plan>
py::class_<Plan> bind_rows(py::class_<Plan> plan) {
  using py::arg;
  return plan
      .def(py::init<const Integers&, const Integers&, const Integers&, const Integers&, const Integers&,
                    const Integers&>(),
           arg("numel"), arg("first_index"), arg("param_id"), arg("group"), arg("param_dtype"), arg("state_dtype"))
      .def("set_tensors", &Plan::set_tensors, arg("param"), arg("exp_avg"), arg("exp_avg_sq"), arg("max_exp_avg_sq"),
           arg("master"), arg("remainder"), arg("step"))
      .def("set_grads", &Plan::set_grads, arg("grad"), arg("dtype"))
      .def("watch", &Plan::watch, arg("reader"), arg("params"), arg("row"))
      .def("read", &Plan::read, arg("reader"), arg("params"))
      .def("drop_grads", &Plan::drop_grads);
}

}  // namespace halfstep
