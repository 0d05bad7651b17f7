#include "runtime.h"

#include <mutex>
#include <stdexcept>

#include "../ieee_mode.h"
#include "block.h"

namespace emulation {
namespace {

constexpr int kRuntimeVersion = 13000;

std::mutex busy;  // the machine, and everything that block.cpp has
Machine now;
std::vector<Launch> made;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t noted(cudaError_t result) {
  if (result != cudaSuccess) last_error = result;
  return result;
}

cudaError_t usable() {
  if (now.driver < kRuntimeVersion) return cudaErrorInsufficientDriver;
  return now.devices == 0 ? cudaErrorNoDevice : cudaSuccess;
}

bool fits(const cudaLaunchConfig_t& config) {
  const dim3 &g = config.gridDim, &b = config.blockDim;
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.x == 0 || b.y == 0 || b.z == 0) return false;
  if (g.x > INT_MAX || g.y > 65535 || g.z > 65535 || b.x > 1024 || b.y > 1024 || b.z > 64) return false;
  return static_cast<uint64_t>(b.x) * b.y * b.z <= 1024;
}

std::vector<int64_t> blocks_to_run(int64_t count) {
  std::vector<int64_t> chosen;
  const bool all = now.ends_only == 0 || 2 * now.ends_only >= count;
  for (int64_t i = 0; i < count; ++i) {
    if (!all && i == now.ends_only) i = count - now.ends_only;
    chosen.push_back(i);
  }
  arrange(chosen, now.order, 0);
  return chosen;
}

}  // namespace

Machine machine() {
  const std::lock_guard<std::mutex> hold(busy);
  return now;
}

void set_machine(const Machine& wanted) {
  const std::lock_guard<std::mutex> hold(busy);
  now = wanted;
}

std::vector<Launch> launches() {
  const std::lock_guard<std::mutex> hold(busy);
  return made;
}

void forget_launches() {
  const std::lock_guard<std::mutex> hold(busy);
  made.clear();
}

cudaError_t launch(const cudaLaunchConfig_t& config, const Work& work) {
  const std::lock_guard<std::mutex> hold(busy);
  if (const cudaError_t result = usable()) return noted(result);
  if (now.launch_result != cudaSuccess) return noted(now.launch_result);
  if (!fits(config)) return noted(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes || config.numAttrs)
    throw std::logic_error("the emulator knows neither dynamic shared memory nor launch attributes");
  made.push_back({config.gridDim, config.blockDim, current_device, config.stream});
  const halfstep::IeeeMode mode;
  const dim3& grid = config.gridDim;
  const int64_t plane = static_cast<int64_t>(grid.x) * grid.y;
  for (const int64_t i : blocks_to_run(plane * grid.z)) {
    const uint3 index{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                      static_cast<unsigned>(i / plane)};
    run_block(work, grid, config.blockDim, index, now.order);
  }
  return cudaSuccess;
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine().devices;
  return noted(usable());
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return noted(usable());
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t result = usable()) return noted(result);
  if (device < 0 || device >= machine().devices) return noted(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t result = usable()) return noted(result);
  const Machine m = machine();
  if (device < 0 || device >= m.devices) return noted(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? m.major : m.minor;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define HALFSTEP_NAME(name) \
  case name:                \
    return #name;
    HALFSTEP_NAME(cudaSuccess)
    HALFSTEP_NAME(cudaErrorInvalidValue)
    HALFSTEP_NAME(cudaErrorInvalidConfiguration)
    HALFSTEP_NAME(cudaErrorInsufficientDriver)
    HALFSTEP_NAME(cudaErrorInvalidDeviceFunction)
    HALFSTEP_NAME(cudaErrorNoDevice)
    HALFSTEP_NAME(cudaErrorInvalidDevice)
    HALFSTEP_NAME(cudaErrorNoKernelImageForDevice)
    HALFSTEP_NAME(cudaErrorUnsupportedPtxVersion)
    HALFSTEP_NAME(cudaErrorLaunchFailure)
#undef HALFSTEP_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
