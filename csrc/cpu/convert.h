// Blocks of 16-bit values to float32 and back. Included by kernels.cpp alone: which instructions it uses follows the flags
// that file is compiled with. The results do not (rounding.h defines them; F16C's agree bit for bit).
#pragma once
#if defined(__AVX512F__) || defined(__F16C__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header: _mm512_undefined_ps()
#endif
#include <immintrin.h>
#endif

#include "philox.h"
#include "tensor_table.h"

namespace halfstep {

constexpr int kBlock = 512;  // elements converted at a time: five float32 buffers of a block stay in 10 KiB of L1

HALFSTEP_FN void widen_half(const uint16_t* x, float* out, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < n; ++i) out[i] = float_from_half(x[i]);
}

HALFSTEP_FN void narrow_half(const float* x, uint16_t* out, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) out[i] = half_from_float(x[i]);
}

HALFSTEP_FN void widen_bf16(const uint16_t* x, float* out, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) out[i] = float_from_bf16(x[i]);
}

HALFSTEP_FN void narrow_bf16(const float* x, uint16_t* out, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) out[i] = bf16_from_float(x[i]);
}

static const char* at(const void* x, Dtype d, int64_t i) { return static_cast<const char*>(x) + i * item_size(d); }
static char* at(void* x, Dtype d, int64_t i) { return static_cast<char*>(x) + i * item_size(d); }

// A block as float32: where it lies if it is float32 already, else widened into `buffer`.
static const float* widen(const void* x, Dtype d, float* buffer, int n) {
  if (d == Dtype::f32) return static_cast<const float*>(x);
  const uint16_t* h = static_cast<const uint16_t*>(x);
  if (d == Dtype::bf16)
    widen_bf16(h, buffer, n);
  else
    widen_half(h, buffer, n);
  return buffer;
}
static float* widen(void* x, Dtype d, float* buffer, int n) {
  if (d == Dtype::f32) return static_cast<float*>(x);
  widen(static_cast<const void*>(x), d, buffer, n);
  return buffer;
}

// `words` lists the random word of each element of the block.
static void random_words(uint32_t* words, const RandomKey& key, int64_t first, int n) {
  const int skip = static_cast<int>(first & 3);
  uint32_t quads[kBlock + 8];
  const uint64_t counter = static_cast<uint64_t>(first) >> 2;
  const int count = (skip + n + 3) / 4;
#pragma omp simd
  for (int q = 0; q < count; ++q) {
    const uint64_t c = counter + static_cast<uint64_t>(q);
    const Philox4 r = philox4x32_10(static_cast<uint32_t>(c), static_cast<uint32_t>(c >> 32), key.param_id, key.stream,
                                    key.seed, key.t);
    quads[4 * q] = r.word[0];
    quads[4 * q + 1] = r.word[1];
    quads[4 * q + 2] = r.word[2];
    quads[4 * q + 3] = r.word[3];
  }
  memcpy(words, quads + skip, sizeof(uint32_t) * static_cast<size_t>(n));
}

// A block of float32 into its 16-bit home, to nearest, or stochastically with a key (`first`: index of element 0).
static void narrow(const float* x, void* out, Dtype d, int n, const RandomKey* key, int64_t first) {
  uint16_t* h = static_cast<uint16_t*>(out);
  if (!key) {
    if (d == Dtype::bf16)
      narrow_bf16(x, h, n);
    else
      narrow_half(x, h, n);
    return;
  }
  uint32_t words[kBlock];
  random_words(words, *key, first, n);
  if (d == Dtype::bf16) {
#pragma omp simd
    for (int i = 0; i < n; ++i) h[i] = bf16_from_float_stochastic(x[i], words[i]);
  } else {
    for (int i = 0; i < n; ++i) h[i] = half_from_float_stochastic(x[i], words[i]);
  }
}

}  // namespace halfstep
