// Which instruction sets this build has code for, and which of them this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace halfstep {

std::vector<std::string> compiled_isas();            // worst first
std::vector<std::string> supported_isas();           // of those, the ones this CPU runs
const Kernels* kernels_for(const std::string& isa);  // "" = the best; throws std::invalid_argument

}  // namespace halfstep
