// Host stand-in for the part of the CUDA runtime that halfstep's kernels and launchers use; for tests, in no user's build.
//
// One block runs after the other, each thread of it on a stack of its own, all on the launching host thread: see block.h. The
// launch is over when cudaLaunchKernelEx returns. What is not declared here is not used by the kernels; in particular nothing
// that waits for the device or allocates on it, so that a launcher which could not be captured in a graph does not compile.
//
// It cannot show: races between blocks, orderings that hold on the host and not on a GPU (fences), what ptxas makes of the code.
#pragma once
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

// ---- language ---------------------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // not an attribute: __attribute__((__noinline__)), which the standard library writes, must stay valid
#define __launch_bounds__(...)
#define __grid_constant__
// One block runs at a time, so its memory can be static; in a section of its own it can be filled before each block, because on
// a GPU it holds anything. (In a template GCC would ignore the section.)
#define __shared__ static __attribute__((section("halfstep_shared")))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the thread that runs. Plain variables: macros would clash with the members of cudaLaunchConfig_t.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- device and launch ------------------------------------------------------------------------------------------------------
using cudaStream_t = struct CUstream_st*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorLaunchFailure = 719,
};

enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emulation {

// What one thread runs.
struct Work {
  void (*call)(const void* kernel_and_arguments);
  const void* kernel_and_arguments;
};

cudaError_t launch(const cudaLaunchConfig_t& config, const Work& work);

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;
};

// Not instrumented: the copies of by-value parameters are the emulator's doing, and too many to watch.
template <class... Parameters>
__attribute__((no_sanitize("thread", "address", "undefined"))) void call(const void* made) {
  const auto& one = *static_cast<const Call<Parameters...>*>(made);
  std::apply(one.kernel, one.arguments);
}

}  // namespace emulation

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 32764, "a kernel takes at most 32,764 bytes of parameters");
  const emulation::Call<Parameters...> made{kernel, {static_cast<Parameters>(arguments)...}};
  return emulation::launch(*config, {emulation::call<Parameters...>, &made});
}

#include "device_functions.h"
