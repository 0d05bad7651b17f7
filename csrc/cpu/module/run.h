// How the caller wants the CPU kernels to run.
#pragma once
#include "../../module/arguments.h"
#include "../isa.h"
#include "../multi_tensor.h"

namespace halfstep {

inline Run run_with(int threads, const std::string& isa) {
  if (threads < 1) refuse("threads must be at least 1, got " + std::to_string(threads));
  return {threads, kernels_for(isa)};
}

}  // namespace halfstep
