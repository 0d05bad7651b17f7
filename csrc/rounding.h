// float32 <-> bfloat16 / float16, nearest and stochastic, and the split master: integer work on bit patterns, so
// that every backend (CPU of any ISA, CUDA, emulated CUDA) makes the same bits. Host and device.
#pragma once
#include <cstdint>
#include <cstring>

// Internal linkage and forced inlining: these headers are compiled once per instruction set, and a shared copy picked
// by the linker could carry AVX-512 code into the baseline path.
#if defined(__CUDACC__)
#define HALFSTEP_FN static __host__ __device__ __forceinline__
#else
#define HALFSTEP_FN static inline __attribute__((always_inline))
#endif

namespace halfstep {

HALFSTEP_FN uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
HALFSTEP_FN float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

template <class T>
HALFSTEP_FN T select(bool condition, T a, T b) {
  return condition ? a : b;
}

constexpr uint32_t kInfBits = 0x7F800000u;  // float32 infinity; above it, sign removed, are the NaNs

HALFSTEP_FN bool is_finite(float x) { return (bits_of(x) & kInfBits) != kInfBits; }

// Below, Real is float and Word is uint32_t, or both are vectors of them (cpu/simd.h). A 16-bit pattern is the lower half
// of a word.

// ---- bfloat16: the upper half of a float32 -------------------------------------------------------------------------
template <class Word>
HALFSTEP_FN auto float_from_bf16(Word h) {
  return float_of(h << 16);
}

template <class Real>
HALFSTEP_FN auto bf16_from_float(Real x) {
  const auto u = bits_of(x);
  const auto nearest = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const auto quiet_nan = (u >> 16) | 0x40u;
  return select(x != x, quiet_nan, nearest);
}

// Rounds up with probability (dropped bits) / 2^16; `word` is uniform over 32 bits.
template <class Real, class Word>
HALFSTEP_FN Word bf16_from_float_stochastic(Real x, Word word) {
  const Word u = bits_of(x);
  const Word rounded = (u + (word & 0xFFFFu)) >> 16;
  const Word upper = u >> 16;
  const Word kept = select(x != x, upper | 0x40u, upper);
  return select((u & kInfBits) == kInfBits, kept, rounded);
}

// ---- float16 -------------------------------------------------------------------------------------------------------
template <class Word>
HALFSTEP_FN auto float_from_half(Word h) {
  const Word magnitude = h & 0x7FFFu;
  const uint32_t rebias = 112u << 23;  // 127 - 15
  const Word normal = (magnitude << 13) + rebias;
  // 0.5 has a spacing of 2^-24, float16's smallest subnormal: exact, and no denormal operand
  const Word subnormal = bits_of(float_of(magnitude + 0x3F000000u) - 0.5f);
  const Word special = normal + rebias;
  const Word quiet = select(magnitude > 0x7C00u, special | 0x400000u, special);
  const Word bits = select(magnitude < 0x0400u, subnormal, select(magnitude > 0x7BFFu, quiet, normal));
  return float_of(bits | ((h & 0x8000u) << 16));
}

template <class Real>
HALFSTEP_FN auto half_from_float(Real x) {
  const auto u = bits_of(x);
  const auto magnitude = u & 0x7FFFFFFFu;
  const auto shifted = magnitude - (112u << 23);
  const auto normal = (shifted + 0xFFFu + ((shifted >> 13) & 1u)) >> 13;  // carries into Inf from 65520 on
  const auto subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const auto quiet_nan = ((magnitude >> 13) & 0x3FFu) | 0x7E00u;
  const auto special = select(x != x, quiet_nan, (u & 0u) | 0x7C00u);
  const auto bits = select(magnitude > 0x477FFFFFu, special, select(magnitude < 0x38800000u, subnormal, normal));
  return bits | ((u >> 16) & 0x8000u);
}

// The magnitude in units of float16's grid, as fixed point with 32 fraction bits, plus a uniform word, truncated.
HALFSTEP_FN uint32_t half_from_float_stochastic(float x, uint32_t word) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t sign = (u >> 16) & 0x8000u;
  if (magnitude >= 0x47800000u)  // 65536 and above, Inf, NaN
    return sign | (magnitude > kInfBits ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : 0x7C00u);
  const int biased = static_cast<int>(magnitude >> 23);
  const int exponent = biased ? biased - 127 : -126;
  const uint64_t significand = biased ? (magnitude & 0x7FFFFFu) | 0x800000u : magnitude;
  const int dropped = exponent >= -14 ? 13 : -1 - exponent;
  const uint64_t fixed = dropped >= 57 ? 0 : (significand << 32) >> dropped;
  const uint32_t grid = static_cast<uint32_t>((fixed + word) >> 32);
  const uint32_t bits = exponent >= -14 ? (static_cast<uint32_t>(exponent + 14) << 10) + grid : grid;
  return sign | bits;  // a carry out of 65504 ends at 0x7C00, Inf
}

// ---- split master: bfloat16 weight + signed 16-bit remainder = the exact float32 -------------------------------------
// The weight is the upper half rounded half away from zero, so the remainder is the lower half read as signed.
template <class Real, class Word>
HALFSTEP_FN void split_master(Real x, Word& weight, Word& remainder) {
  const Word u = bits_of(x);
  weight = select(x != x, ((u >> 16) & 0x8000u) | 0x7FC0u, (u + 0x8000u) >> 16);
  remainder = select(x != x, u & 0u, u & 0xFFFFu);
}

// `remainder` is sign-extended to 32 bits. A weight another program wrote may meet an old remainder: it counts only where it
// keeps the magnitude between 0 and Inf, so that a 0 does not wrap around and an Inf does not become a NaN.
template <class Word>
HALFSTEP_FN auto join_master(Word weight, Word remainder) {
  const Word w = weight << 16;
  const Word magnitude = w & 0x7FFFFFFFu;
  const auto negative = (remainder & 0x80000000u) != 0u;
  const auto leaves = ((magnitude == 0u) & negative) | ((magnitude == kInfBits) & !negative);
  return float_of(w + select(leaves, w & 0u, remainder));
}

}  // namespace halfstep
