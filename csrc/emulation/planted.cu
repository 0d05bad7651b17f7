// Faults that kernels can have, one each, to show what the emulator sees of them: `planted NAME ORDER` runs the kernel with the
// fault, `planted healthy ORDER` all of them without. tests/test_emulator.py says which build and order sees what.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "runtime.h"

namespace {

constexpr int kThreads = 64, kItems = 61;
using Kernel = void (*)(float* x, int n, bool fault);

int thread() { return static_cast<int>(threadIdx.x); }

// Expected of all: each of n items is one more.
__global__ void out_of_bounds(float* x, int n, bool fault) {
  if (thread() < (fault ? n + 1 : n)) x[thread()] = x[thread()] + 1.0f;
}

__global__ void shared_out_of_bounds(float* x, int n, bool fault) {
  __shared__ float s[kThreads];
  s[thread()] = 1.0f;
  __syncthreads();
  if (thread() < n) x[thread()] += s[fault ? thread() + kThreads - n + 1 : thread()];
}

// Through a pointer, of whose array the compiler does not know the length.
__global__ void beside_shared(float* x, int n, bool fault) {
  __shared__ float s[kThreads];
  s[thread()] = 1.0f;
  __syncthreads();
  const float* at = s;
  asm volatile("" : "+r"(at));
  if (thread() < n) x[thread()] += at[fault ? thread() + kThreads - n + 1 : thread()];
}

__global__ void barrier_missing(float* x, int n, bool fault) {
  __shared__ float s[kThreads];
  s[thread()] = 1.0f;
  if (!fault) __syncthreads();
  if (thread() < n) x[thread()] += s[kThreads - 1 - thread()];
}

// Right in ascending order only: a thread overwrites what the one before it still has to read.
__global__ void overwritten_too_early(float* x, int n, bool fault) {
  __shared__ float s[kThreads + 1];
  s[thread()] = 1.0f;
  if (thread() == 0) s[kThreads] = 1.0f;
  __syncthreads();
  const float next = s[thread() + 1];
  if (!fault) __syncthreads();
  s[thread()] = 5.0f;
  if (thread() < n) x[thread()] += next;
}

__global__ void warp_barrier_missing(float* x, int n, bool fault) {
  __shared__ float s[kThreads];
  s[thread()] = 1.0f;
  if (!fault) __syncwarp();
  if (thread() < n) x[thread()] += s[thread() ^ 31];
}

struct alignas(16) Four {
  float item[4];
};
__global__ void misaligned(float* x, int n, bool fault) {
  if (fault && thread() == 0) {
    Four four = *reinterpret_cast<const Four*>(x + 1);
    x[1] = four.item[0];
  }
  if (thread() < n) x[thread()] += 1.0f;
}

// Right where the memory happens to hold zeros.
__global__ void uninitialised_shared(float* x, int n, bool fault) {
  __shared__ float zero;
  if (thread() == 0 && !fault) zero = 0.0f;
  __syncthreads();
  if (thread() < n) x[thread()] += 1.0f + zero;
}

// The offset of a block in a tensor of more than 2^31 elements.
__global__ void offset_overflow(float* x, int n, bool fault) {
  const int block = n + 131072 - kItems, elements = 16384;
  const int64_t begin = fault ? block * elements : static_cast<int64_t>(block) * elements;
  const int i = static_cast<int>(begin % elements) + thread();
  if (i < n) x[i] += 1.0f;
}

__global__ void barrier_not_met_by_all(float* x, int n, bool fault) {
  if (fault && thread() >= n) return;
  __syncthreads();  // barrier_not_met_by_all
  if (thread() < n) x[thread()] += 1.0f;
}

__global__ void barriers_at_two_places(float* x, int n, bool fault) {
  if (fault && thread() % 2) {
    __syncthreads();
  } else {
    __syncthreads();  // barriers_at_two_places
  }
  if (thread() < n) x[thread()] += 1.0f;
  if (!fault) __syncthreads();
}

__global__ void shuffle_not_met_by_all(float* x, int n, bool fault) {
  float one = 1.0f;
  if (!fault || thread() % 32 < 16) one = __shfl_xor_sync(0xFFFFFFFFu, one, 1);  // shuffle_not_met_by_all
  if (thread() < n) x[thread()] += one;
}

__global__ void shuffle_from_outside_its_mask(float* x, int n, bool fault) {
  const unsigned half = thread() % 32 < 16 ? 0xFFFFu : 0xFFFF0000u;
  const float one = __shfl_xor_sync(half, 1.0f, fault ? 16 : 8);
  if (thread() < n) x[thread()] += one;
}

__global__ void mask_without_the_caller(float* x, int n, bool fault) {
  const unsigned all = 0xFFFFFFFFu;
  const unsigned mask = !fault ? all : thread() == 7 ? 0x7Fu : all & ~(1u << 7);
  __syncwarp(mask);  // mask_without_the_caller
  if (thread() < n) x[thread()] += 1.0f;
}

// The emulator's threads do not interrupt each other, so the sum is right in every order, and wrong on a GPU.
__global__ void update_without_atomic(float* x, int n, bool fault) {
  __shared__ int sum;
  int* at = fault ? &sum : nullptr;
  if (thread() == 0) sum = 0;
  __syncthreads();
  if (at)
    *at = *at + 1;
  else
    atomicAdd(&sum, 1);
  __syncthreads();
  if (thread() < n) x[thread()] += static_cast<float>(sum / kThreads);
}

__global__ void global_race(float* x, int n, bool fault) {
  if (thread() >= n) return;
  if (fault && thread() == 1) x[0] = 2.0f;
  x[thread()] = 2.0f;
}

struct Fault {
  const char* name;
  Kernel kernel;
};
const Fault kFaults[] = {
#define HALFSTEP_FAULT(name) {#name, name}
    HALFSTEP_FAULT(out_of_bounds),
    HALFSTEP_FAULT(shared_out_of_bounds),
    HALFSTEP_FAULT(beside_shared),
    HALFSTEP_FAULT(barrier_missing),
    HALFSTEP_FAULT(overwritten_too_early),
    HALFSTEP_FAULT(warp_barrier_missing),
    HALFSTEP_FAULT(misaligned),
    HALFSTEP_FAULT(uninitialised_shared),
    HALFSTEP_FAULT(offset_overflow),
    HALFSTEP_FAULT(barrier_not_met_by_all),
    HALFSTEP_FAULT(barriers_at_two_places),
    HALFSTEP_FAULT(shuffle_not_met_by_all),
    HALFSTEP_FAULT(shuffle_from_outside_its_mask),
    HALFSTEP_FAULT(mask_without_the_caller),
    HALFSTEP_FAULT(update_without_atomic),
    HALFSTEP_FAULT(global_race),
#undef HALFSTEP_FAULT
};

bool right(Kernel kernel, bool fault) {
  std::vector<float> x(kItems, 1.0f);
  cudaLaunchConfig_t config = {};
  config.gridDim = 1;
  config.blockDim = kThreads;
  if (cudaLaunchKernelEx(&config, kernel, x.data(), kItems, fault) != cudaSuccess) return false;
  for (const float item : x)
    if (!(item == 2.0f)) return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  emulation::Machine machine;
  machine.order = {static_cast<emulation::Order::Mode>(std::atoi(argv[2])), 1};
  emulation::set_machine(machine);
  const std::string wanted = argv[1];
  int wrong = 0;
  try {
    for (const Fault& one : kFaults) {
      if (wanted != "healthy" && wanted != one.name) continue;
      const bool good = right(one.kernel, wanted == one.name);
      std::printf("%s: %s\n", one.name, good ? "right" : "wrong");
      wrong += !good;
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
  return wrong ? 4 : 0;
}
