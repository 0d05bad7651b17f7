#include "isa.h"

#include <stdexcept>

namespace halfstep {
namespace {

struct Isa {
  const Kernels* kernels;
  bool supported;
};

std::vector<Isa> isas() {
  std::vector<Isa> list;
#if defined(__aarch64__)
  list.push_back({&neon::kernels, true});
#else
  list.push_back({&baseline::kernels, true});
#endif
#if defined(HALFSTEP_HAS_AVX2)
  list.push_back({&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")});
#endif
#if defined(HALFSTEP_HAS_AVX512)
  list.push_back({&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                        __builtin_cpu_supports("f16c")});
#endif
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
