// Vectors to and from memory in each dtype. Included by kernels.cpp alone: which instructions it uses follows the flags that
// file is compiled with. The results do not (rounding.h defines them; F16C's agree bit for bit).
#pragma once
#include <cstring>

#include "philox.h"
#include "simd.h"
#include "tensor_table.h"

namespace halfstep {
namespace {

using WordLanes = uint16_t __attribute__((vector_size(2 * kWidth)));

HALFSTEP_FN const char* at(const void* x, Dtype d, int64_t i) { return static_cast<const char*>(x) + i * item_size(d); }
HALFSTEP_FN char* at(void* x, Dtype d, int64_t i) { return static_cast<char*>(x) + i * item_size(d); }

// A vector at x, whole or only its first n lanes (the others are 0): `kWhole` tells which at compile time.
template <class Lanes, bool kWhole>
HALFSTEP_FN Lanes load_lanes(const void* x, int n) {
  Lanes lanes{};
  memcpy(&lanes, x, kWhole ? sizeof(Lanes) : sizeof(lanes[0]) * static_cast<size_t>(n));
  return lanes;
}
template <bool kWhole, class Lanes>
HALFSTEP_FN void store_lanes(void* x, Lanes lanes, int n) {
  memcpy(x, &lanes, kWhole ? sizeof(Lanes) : sizeof(lanes[0]) * static_cast<size_t>(n));
}

// Zero-extends; GCC makes two halves of __builtin_convertvector where the machine has one instruction.
HALFSTEP_FN Bits widen_words(WordLanes words) {
#if defined(__AVX512F__)
  return {reinterpret_cast<BitsLanes>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(words)))};
#elif defined(__AVX2__)
  return {reinterpret_cast<BitsLanes>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(words)))};
#else
  return {__builtin_convertvector(words, BitsLanes)};
#endif
}

HALFSTEP_FN Float widen_half(WordLanes h) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(reinterpret_cast<__m256i>(h))};
#elif defined(__F16C__)
  return {_mm256_cvtph_ps(reinterpret_cast<__m128i>(h))};
#else
  return float_from_half(widen_words(h));
#endif
}

HALFSTEP_FN WordLanes narrow_half(Float x) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordLanes>(_mm512_cvtps_ph(x.lanes, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<WordLanes>(_mm256_cvtps_ph(x.lanes, _MM_FROUND_TO_NEAREST_INT));
#else
  return __builtin_convertvector(half_from_float(x).lanes, WordLanes);
#endif
}

// 16-bit patterns in the lower halves of words.
template <bool kWhole>
HALFSTEP_FN Bits load_words(const void* x, int n) {
  return widen_words(load_lanes<WordLanes, kWhole>(x, n));
}
template <bool kWhole>
HALFSTEP_FN void store_words(void* x, Bits words, int n) {
  store_lanes<kWhole>(x, __builtin_convertvector(words.lanes, WordLanes), n);
}

// Elements i, i + 1, ... of x as float32.
template <bool kWhole>
HALFSTEP_FN Float load(const void* x, Dtype d, int64_t i, int n) {
  const char* here = at(x, d, i);
  if (d == Dtype::f32) return {load_lanes<FloatLanes, kWhole>(here, n)};
  if (d == Dtype::bf16) return float_from_bf16(load_words<kWhole>(here, n));
  return widen_half(load_lanes<WordLanes, kWhole>(here, n));
}

// Rounds to nearest, or stochastically with one random word per lane.
template <bool kWhole>
HALFSTEP_FN void store(void* x, Dtype d, int64_t i, Float value, const uint32_t* random, int n) {
  char* here = at(x, d, i);
  if (d == Dtype::f32) {
    store_lanes<kWhole>(here, value.lanes, n);
  } else if (!random) {
    if (d == Dtype::bf16)
      store_words<kWhole>(here, bf16_from_float(value), n);
    else
      store_lanes<kWhole>(here, narrow_half(value), n);
  } else {
    Bits words{load_lanes<BitsLanes, true>(random, kWidth)};
    if (d == Dtype::bf16)
      words = bf16_from_float_stochastic(value, words);
    else  // its shifts are of 64 bits: lane by lane
      for (int k = 0; k < kWidth; ++k)
        words.lanes[k] = half_from_float_stochastic(static_cast<float>(value.lanes[k]), words.lanes[k]);
    store_words<kWhole>(here, words, n);
  }
}

constexpr int kBlock = 128;      // elements whose random words are drawn, and whose memory is asked for, at a time
constexpr int64_t kAhead = 512;  // elements between the block at work and the block asked for
constexpr int64_t kLine = 64;    // bytes of a cache line

// The random words of elements first .. first + kBlock - 1.
void random_words(uint32_t* words, const RandomKey& key, int64_t first) {
  const int skip = static_cast<int>(first & 3);
  uint32_t quads[kBlock + 4];
  const uint64_t counter = static_cast<uint64_t>(first) >> 2;
#pragma omp simd
  for (int q = 0; q < kBlock / 4 + 1; ++q) {
    const Philox4 r = random_quad(key, counter + static_cast<uint64_t>(q));
    quads[4 * q] = r.word[0];
    quads[4 * q + 1] = r.word[1];
    quads[4 * q + 2] = r.word[2];
    quads[4 * q + 3] = r.word[3];
  }
  memcpy(words, quads + skip, sizeof(uint32_t) * kBlock);
}

}  // namespace
}  // namespace halfstep
