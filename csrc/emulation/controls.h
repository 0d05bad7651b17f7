// What the emulated module offers to tests beside the operators. Included by the bindings, for it alone.
#pragma once
#include "../module/arguments.h"
#include "runtime.h"

namespace halfstep {

template <class Value>
void bind_setting(py::module_& m, const char* name, Value emulation::Machine::* setting) {
  m.def(name, [setting](Value value) {
    emulation::Machine wanted = emulation::machine();
    wanted.*setting = value;
    emulation::set_machine(wanted);
  });
}

inline py::tuple tuple_of(const dim3& d) { return py::make_tuple(d.x, d.y, d.z); }

inline py::list launches() {
  py::list all;
  for (const emulation::Launch& launch : emulation::launches())
    all.append(py::dict(py::arg("grid") = tuple_of(launch.grid), py::arg("block") = tuple_of(launch.block),
                        py::arg("device") = launch.device,
                        py::arg("stream") = reinterpret_cast<uintptr_t>(launch.stream)));
  return all;
}

inline void bind_emulation(py::module_& m) {
  using emulation::Machine;
  bind_setting(m, "set_devices", &Machine::devices);
  bind_setting(m, "set_driver", &Machine::driver);
  bind_setting(m, "set_ends_only", &Machine::ends_only);
  m.def("set_order", [](int mode, unsigned seed) {
    Machine wanted = emulation::machine();
    wanted.order = {static_cast<emulation::Order::Mode>(mode), seed};
    emulation::set_machine(wanted);
  });
  m.def("set_capability", [](int major, int minor) {
    Machine wanted = emulation::machine();
    wanted.major = major;
    wanted.minor = minor;
    emulation::set_machine(wanted);
  });
  m.def("set_launch_result", [](int code) {
    Machine wanted = emulation::machine();
    wanted.launch_result = static_cast<cudaError_t>(code);
    emulation::set_machine(wanted);
  });
  m.def("reset_machine", [] { emulation::set_machine({}); });
  m.def("current_device", [] {
    int device = -1;
    cudaGetDevice(&device);
    return device;
  });
  m.def("last_error", [] { return static_cast<int>(cudaPeekAtLastError()); });
  m.def("launches", &launches);
  m.def("reset_launches", &emulation::forget_launches);
}

}  // namespace halfstep
