// What tests set and see of the emulated machine.
#pragma once
#include <cuda_runtime.h>

#include <vector>

#include "order.h"

namespace emulation {

struct Machine {
  int devices = 1;
  int driver = 13000;  // the CUDA version it supports, as cudaDriverGetVersion counts; 0: there is none
  int major = 9, minor = 0;
  cudaError_t launch_result = cudaSuccess;  // of every launch, which then does not run
  Order order;
  // If not 0, only so many blocks at each end of a grid run: the ends of a tensor of 2^31 elements in little time.
  int64_t ends_only = 0;
};

struct Launch {
  dim3 grid, block;
  int device;
  cudaStream_t stream;
};

// Copies, under the lock that a launch holds while it runs.
Machine machine();
void set_machine(const Machine& wanted);
std::vector<Launch> launches();
void forget_launches();

}  // namespace emulation
