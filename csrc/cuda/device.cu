#include "device.h"

namespace halfstep {
namespace {

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::string no_driver() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const std::string needed = "halfstep._cuda was built with CUDA " + version(runtime);
  if (!driver) return "there is no NVIDIA driver on this machine (" + needed + "); install one";
  return "the NVIDIA driver supports CUDA " + version(driver) + " at most and " + needed +
         "; update the driver, or rebuild halfstep with an older CUDA";
}

std::string wrong_arch() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string arch = std::to_string(major) + std::to_string(minor);
  return "halfstep._cuda has no code for this GPU (sm_" + arch +
         "; it was built for " HALFSTEP_ARCHS "): rebuild halfstep with CUDAARCHS=" + arch + " in the environment";
}

std::string explained(cudaError_t result) {
  switch (result) {
    case cudaErrorInsufficientDriver:
      return no_driver();
    case cudaErrorNoDevice:
      return "there is no CUDA device, or CUDA_VISIBLE_DEVICES hides it";
    case cudaErrorInvalidDevice:
      return "there is no CUDA device of that number";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return wrong_arch();
    default:
      return std::string(cudaGetErrorName(result)) + " (" + cudaGetErrorString(result) +
             "); it may come from earlier work on this device: CUDA_LAUNCH_BLOCKING=1 in the environment shows where";
  }
}

}  // namespace

void check(cudaError_t result, const std::string& what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // it is reported here: the next call must not meet it again
  throw std::runtime_error("halfstep, " + what + ": " + explained(result));
}

DeviceGuard::DeviceGuard(int device) : device_(device) {
  const std::string what = "CUDA device " + std::to_string(device);
  check(cudaGetDevice(&previous_), what);
  if (previous_ != device) check(cudaSetDevice(device), what);
}

DeviceGuard::~DeviceGuard() {
  if (previous_ != device_) cudaSetDevice(previous_);
}

}  // namespace halfstep
