// A vector of float32 and one of 32-bit words, as wide as the instruction set at hand, with the operators of the numbers
// they stand for: rounding.h and adam_math.h are written once, for a number or a vector of them. Compilers turn these
// (GCC's and Clang's vector extension) into the same instructions as intrinsics. Included by kernels.cpp alone, which is
// compiled once per instruction set, so everything has internal linkage.
#pragma once
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header: _mm512_undefined_ps()
#endif
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rounding.h"

namespace halfstep {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using FloatLanes = float __attribute__((vector_size(4 * kWidth)));
using BitsLanes = uint32_t __attribute__((vector_size(4 * kWidth)));
using MaskLanes = int32_t __attribute__((vector_size(4 * kWidth)));

struct Float {
  FloatLanes lanes;
};
struct Bits {
  BitsLanes lanes;
};
struct Mask {  // 0 or all ones in a lane
  MaskLanes lanes;
};

#define HALFSTEP_OPERATOR(Result, op, Left, left, Right, right) \
  HALFSTEP_FN Result operator op(Left a, Right b) { return {left op right}; }
#define HALFSTEP_OPERATORS(Vector, Number, op)                    \
  HALFSTEP_OPERATOR(Vector, op, Vector, a.lanes, Vector, b.lanes) \
  HALFSTEP_OPERATOR(Vector, op, Vector, a.lanes, Number, b)       \
  HALFSTEP_OPERATOR(Vector, op, Number, a, Vector, b.lanes)
#define HALFSTEP_COMPARISON(Vector, Number, op)                 \
  HALFSTEP_OPERATOR(Mask, op, Vector, a.lanes, Vector, b.lanes) \
  HALFSTEP_OPERATOR(Mask, op, Vector, a.lanes, Number, b)

HALFSTEP_OPERATORS(Float, float, +)
HALFSTEP_OPERATORS(Float, float, -)
HALFSTEP_OPERATORS(Float, float, *)
HALFSTEP_OPERATORS(Float, float, /)
HALFSTEP_OPERATORS(Bits, uint32_t, +)
HALFSTEP_OPERATORS(Bits, uint32_t, -)
HALFSTEP_OPERATORS(Bits, uint32_t, &)
HALFSTEP_OPERATORS(Bits, uint32_t, |)
HALFSTEP_OPERATORS(Bits, uint32_t, ^)
HALFSTEP_OPERATOR(Bits, <<, Bits, a.lanes, int, b)
HALFSTEP_OPERATOR(Bits, >>, Bits, a.lanes, int, b)
HALFSTEP_COMPARISON(Float, float, ==)
HALFSTEP_COMPARISON(Float, float, !=)
HALFSTEP_COMPARISON(Float, float, >)
HALFSTEP_COMPARISON(Float, float, >=)
HALFSTEP_COMPARISON(Float, float, <=)
HALFSTEP_COMPARISON(Bits, uint32_t, ==)
HALFSTEP_COMPARISON(Bits, uint32_t, !=)
HALFSTEP_COMPARISON(Bits, uint32_t, <)
HALFSTEP_COMPARISON(Bits, uint32_t, >)
HALFSTEP_COMPARISON(Bits, uint32_t, >=)
HALFSTEP_OPERATOR(Mask, &, Mask, a.lanes, Mask, b.lanes)
HALFSTEP_OPERATOR(Mask, |, Mask, a.lanes, Mask, b.lanes)

#undef HALFSTEP_COMPARISON
#undef HALFSTEP_OPERATORS
#undef HALFSTEP_OPERATOR

HALFSTEP_FN Mask operator!(Mask a) { return {~a.lanes}; }
HALFSTEP_FN Bits bits_of(Float x) { return {reinterpret_cast<BitsLanes>(x.lanes)}; }
HALFSTEP_FN Bits bits_of(Mask x) { return {reinterpret_cast<BitsLanes>(x.lanes)}; }
HALFSTEP_FN Float float_of(Bits u) { return {reinterpret_cast<FloatLanes>(u.lanes)}; }
HALFSTEP_FN Float select(Mask where, Float a, Float b) { return {where.lanes ? a.lanes : b.lanes}; }
HALFSTEP_FN Bits select(Mask where, Bits a, Bits b) { return {where.lanes ? a.lanes : b.lanes}; }
HALFSTEP_FN Bits select(Mask where, Bits a, uint32_t b) { return select(where, a, Bits{BitsLanes{} + b}); }
HALFSTEP_FN Bits select(Mask where, uint32_t a, Bits b) { return select(where, Bits{BitsLanes{} + a}, b); }

HALFSTEP_FN Float square_root(Float x) {
#if defined(__AVX512F__)
  return {_mm512_sqrt_ps(x.lanes)};
#elif defined(__AVX2__)
  return {_mm256_sqrt_ps(x.lanes)};
#elif defined(__x86_64__)
  return {_mm_sqrt_ps(x.lanes)};
#elif defined(__aarch64__)
  return {vsqrtq_f32(x.lanes)};
#else
  for (int i = 0; i < kWidth; ++i) x.lanes[i] = sqrtf(x.lanes[i]);
  return x;
#endif
}

HALFSTEP_FN bool all(Mask x) {
  int32_t every = -1;
  for (int i = 0; i < kWidth; ++i) every &= x.lanes[i];
  return every != 0;
}

HALFSTEP_FN uint32_t sum(Bits x) {
  uint32_t total = 0;
  for (int i = 0; i < kWidth; ++i) total += x.lanes[i];
  return total;
}

}  // namespace
}  // namespace halfstep
