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

constexpr uint32_t kInfBits = 0x7F800000u;  // float32 infinity; above it, sign removed, are the NaNs

HALFSTEP_FN bool is_finite(float x) { return (bits_of(x) & kInfBits) != kInfBits; }

// ---- bfloat16: the upper half of a float32 -------------------------------------------------------------------------
HALFSTEP_FN float float_from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

HALFSTEP_FN uint16_t bf16_from_float(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t nearest = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > kInfBits ? quiet_nan : nearest);
}

// Rounds up with probability (dropped bits) / 2^16; `word` is uniform over 32 bits.
HALFSTEP_FN uint16_t bf16_from_float_stochastic(float x, uint32_t word) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t rounded = (u + (word & 0xFFFFu)) >> 16;
  const uint32_t kept = (u >> 16) | (magnitude > kInfBits ? 0x40u : 0u);
  return static_cast<uint16_t>(magnitude >= kInfBits ? kept : rounded);
}

// ---- float16 -------------------------------------------------------------------------------------------------------
HALFSTEP_FN float float_from_half(uint16_t h) {
  const uint32_t magnitude = h & 0x7FFFu;
  const uint32_t rebias = 112u << 23;  // 127 - 15
  const uint32_t normal = (magnitude << 13) + rebias;
  // 0.5 has a spacing of 2^-24, float16's smallest subnormal: exact, and no denormal operand
  const uint32_t subnormal = bits_of(float_of(0x3F000000u + magnitude) - 0.5f);
  const uint32_t special = normal + rebias + (magnitude > 0x7C00u ? (~normal & 0x400000u) : 0u);
  const uint32_t bits = magnitude < 0x0400u ? subnormal : (magnitude >= 0x7C00u ? special : normal);
  return float_of(bits | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

HALFSTEP_FN uint16_t half_from_float(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t shifted = magnitude - (112u << 23);
  const uint32_t normal = (shifted + 0xFFFu + ((shifted >> 13) & 1u)) >> 13;  // carries into Inf from 65520 on
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t special = magnitude > kInfBits ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : 0x7C00u;
  const uint32_t bits = magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? subnormal : normal);
  return static_cast<uint16_t>(bits | ((u >> 16) & 0x8000u));
}

// The magnitude in units of float16's grid, as fixed point with 32 fraction bits, plus a uniform word, truncated.
HALFSTEP_FN uint16_t half_from_float_stochastic(float x, uint32_t word) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t sign = (u >> 16) & 0x8000u;
  if (magnitude >= 0x47800000u)  // 65536 and above, Inf, NaN
    return static_cast<uint16_t>(sign | (magnitude > kInfBits ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : 0x7C00u));
  const int biased = static_cast<int>(magnitude >> 23);
  const int exponent = biased ? biased - 127 : -126;
  const uint64_t significand = biased ? (magnitude & 0x7FFFFFu) | 0x800000u : magnitude;
  const int dropped = exponent >= -14 ? 13 : -1 - exponent;
  const uint64_t fixed = dropped >= 57 ? 0 : (significand << 32) >> dropped;
  const uint32_t grid = static_cast<uint32_t>((fixed + word) >> 32);
  const uint32_t bits = exponent >= -14 ? (static_cast<uint32_t>(exponent + 14) << 10) + grid : grid;
  return static_cast<uint16_t>(sign | bits);  // a carry out of 65504 ends at 0x7C00, Inf
}

// ---- split master: bfloat16 weight + signed 16-bit remainder = the exact float32 -------------------------------------
// The weight is the upper half rounded half away from zero, so the remainder is the lower half read as signed.
HALFSTEP_FN void split_master(float x, uint16_t* weight, int16_t* remainder) {
  const uint32_t u = bits_of(x);
  const bool nan = (u & 0x7FFFFFFFu) > kInfBits;
  *weight = static_cast<uint16_t>(nan ? ((u >> 16) & 0x8000u) | 0x7FC0u : (u + 0x8000u) >> 16);
  *remainder = static_cast<int16_t>(nan ? 0u : u & 0xFFFFu);
}

// A weight another program wrote may meet an old remainder: the magnitude stays between 0 and Inf, so that a 0 does not
// wrap around and an Inf does not become a NaN.
HALFSTEP_FN float join_master(uint16_t weight, int16_t remainder) {
  const uint32_t w = static_cast<uint32_t>(weight) << 16;
  const int32_t magnitude = static_cast<int32_t>(w & 0x7FFFFFFFu);
  const int32_t inf = static_cast<int32_t>(kInfBits);
  const int32_t sum = magnitude + remainder;
  const int32_t joined = sum < 0 ? 0 : (sum > inf ? inf : sum);
  return float_of((w & 0x80000000u) | static_cast<uint32_t>(magnitude > inf ? magnitude : joined));
}

}  // namespace halfstep
