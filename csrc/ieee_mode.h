// The floating-point mode of the contract, for as long as an object lives.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace halfstep {

// The contract's arithmetic on this thread: round to nearest, denormals kept, whatever the caller's thread uses
// (torch.set_flush_denormal would otherwise change the bits).
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    write(0);
  }
  ~IeeeMode() { write(saved_); }

 private:
  static void write(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
  uint64_t saved_;
#endif
};

// Compilers do not know that arithmetic depends on the mode: GCC moved a conversion behind the end of the scope it stood
// in. What enters or leaves such a scope in a register passes through here; volatile accesses stay where they are.
template <class T>
inline T pinned(T value) {
  volatile T memory = value;
  return memory;
}

}  // namespace halfstep
