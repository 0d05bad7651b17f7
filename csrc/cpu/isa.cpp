#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace halfstep {
namespace {

#if defined(__x86_64__)
// By hand: Clang before 17 and GCC before 11 do not know the name "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

struct Isa {
  const Kernels* kernels;
  bool supported;
};

std::vector<Isa> detect() {
  std::vector<Isa> list;
#if defined(__aarch64__)
  list.push_back({&neon::kernels, true});
#else
  list.push_back({&baseline::kernels, true});
#endif
#if defined(HALFSTEP_HAS_AVX2)
  list.push_back({&avx2::kernels, __builtin_cpu_supports("avx2") && has_f16c()});
#endif
#if defined(HALFSTEP_HAS_AVX512)
  list.push_back({&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                        has_f16c()});
#endif
  return list;
}

// Asked once: every CPUID traps to the hypervisor on a virtual machine, which costs more than a small step.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> list = detect();
  return list;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.emplace_back(isa.kernels->name);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas())
    if (isa.supported) names.emplace_back(isa.kernels->name);
  return names;
}

const Kernels* kernels_for(const std::string& name) {
  const Kernels* best = nullptr;
  for (const Isa& isa : isas()) {
    if (name == isa.kernels->name && !isa.supported)
      throw std::invalid_argument("isa '" + name + "' is built, but this CPU cannot run it");
    if (isa.supported && (name.empty() || name == isa.kernels->name)) best = isa.kernels;
  }
  if (!best) throw std::invalid_argument("isa '" + name + "' is not in this build; see supported_isas()");
  return best;
}

}  // namespace halfstep
