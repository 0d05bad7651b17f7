// What device code calls: barriers, exchange within a warp, atomics, casts of bits. Included by cuda_runtime.h.
#pragma once

namespace emulation {

// A call in the kernel's source. Threads that meet are compared by it, and messages name it.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Vote { any, all, count };

// __syncthreads and its siblings: how many threads' predicates hold decides.
int meet_block(Vote vote, bool predicate, Site site);

enum class Exchange { none, value, ballot };

// A warp's threads in `mask` meet. none: only that, and what they wrote before is visible; value: each gets lane `source`'s
// bits; ballot: a bit for each whose value is not 0. The mask's lanes see no more of each other's memory by value and ballot.
uint64_t meet_warp(Exchange exchange, unsigned mask, uint64_t value, int source, Site site);

int lane();

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(From) <= sizeof(To) || sizeof(To) <= sizeof(From));
  To to{};
  std::memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warps exchange 4 or 8 bytes");
  return bits_as<T>(meet_warp(Exchange::value, mask, bits_as<uint64_t>(value), source, site));
}

// old = *at, *at = next(old) at once; what was there.
template <class T, class Next>
T replace(T* at, Next next) {
  T old, fresh;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do {
    fresh = next(old);
  } while (!__atomic_compare_exchange(at, &old, &fresh, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace emulation

// ---- the block --------------------------------------------------------------------------------------------------------------
inline void __syncthreads(emulation::Site site = emulation::Site::here()) {
  emulation::meet_block(emulation::Vote::any, false, site);
}
inline int __syncthreads_or(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::meet_block(emulation::Vote::any, predicate != 0, site);
}
inline int __syncthreads_and(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::meet_block(emulation::Vote::all, predicate != 0, site);
}
inline int __syncthreads_count(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::meet_block(emulation::Vote::count, predicate != 0, site);
}

// ---- the warp (always of 32 lanes) ------------------------------------------------------------------------------------------
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, emulation::Site site = emulation::Site::here()) {
  emulation::meet_warp(emulation::Exchange::none, mask, 0, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulation::Site site = emulation::Site::here()) {
  return static_cast<unsigned>(emulation::meet_warp(emulation::Exchange::ballot, mask, predicate != 0, 0, site));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, emulation::Site site = emulation::Site::here()) {
  return emulation::shuffle(mask, value, source & 31, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, emulation::Site site = emulation::Site::here()) {
  return emulation::shuffle(mask, value, (emulation::lane() ^ lanes) & 31, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, emulation::Site site = emulation::Site::here()) {
  const unsigned source = static_cast<unsigned>(emulation::lane()) + lanes;
  return emulation::shuffle(mask, value, source < 32 ? static_cast<int>(source) : emulation::lane(), site);
}

// ---- atomics: for the types that CUDA has them for --------------------------------------------------------------------------
#define HALFSTEP_ATOMIC(name, T, next)                                              \
  inline T name(T* at, T value) {                                                   \
    return emulation::replace(at, [value](T old) { return static_cast<T>(next); }); \
  }
#define HALFSTEP_ATOMIC_INTEGERS(name, next) \
  HALFSTEP_ATOMIC(name, int, next)           \
  HALFSTEP_ATOMIC(name, unsigned, next)      \
  HALFSTEP_ATOMIC(name, unsigned long long, next)
HALFSTEP_ATOMIC_INTEGERS(atomicOr, old | value)
HALFSTEP_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
HALFSTEP_ATOMIC_INTEGERS(atomicMax, old < value ? value : old)
HALFSTEP_ATOMIC(atomicMin, long long, old < value ? old : value)
HALFSTEP_ATOMIC(atomicMax, long long, old < value ? value : old)
HALFSTEP_ATOMIC(atomicAdd, unsigned, old + value)
HALFSTEP_ATOMIC(atomicAdd, unsigned long long, old + value)
HALFSTEP_ATOMIC(atomicAdd, float, old + value)
HALFSTEP_ATOMIC(atomicAdd, double, old + value)
// A GPU's signed sum wraps around.
HALFSTEP_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
#undef HALFSTEP_ATOMIC_INTEGERS
#undef HALFSTEP_ATOMIC

// ---- bits -------------------------------------------------------------------------------------------------------------------
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline unsigned __float_as_uint(float x) { return emulation::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return emulation::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits_as<float>(x); }
inline float __int_as_float(int x) { return emulation::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::bits_as<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
