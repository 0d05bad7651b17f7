// The first pass over the gradients: their sum of squares in the contract's order, and whether all are finite. Included by
// kernels.cpp alone.
#pragma once
#include "convert.h"
#include "kernels.h"

namespace halfstep {
namespace HALFSTEP_ISA {
namespace {

template <Dtype kDtype>
HALFSTEP_FN float load_one(const void* x, int64_t i) {
  if (kDtype == Dtype::f32) return static_cast<const float*>(x)[i];
  const uint32_t h = static_cast<const uint16_t*>(x)[i];
  return kDtype == Dtype::bf16 ? float_from_bf16(h) : float_from_half(h);
}

// partial[l] = sum over the rows of u * u, in float32 and row order. kAllRows: the 8 rows of a full group, in registers.
template <Dtype kDtype, bool kAllRows>
HALFSTEP_FN void add_squares(const void* x, float factor, int rows, int from, int to, float* partial) {
  if (kAllRows) {
    constexpr int kTile = static_cast<int>(kLine / item_size(kDtype));
    for (int tile = 0; tile < kLanes; tile += kTile) {
      // Rows jump through memory in a way the hardware does not foresee: ask for the same place of the next group.
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(at(x, kDtype, (kRows + r) * kLanes + tile));
#pragma omp simd
      for (int l = tile; l < tile + kTile; ++l) {
        float sum = 0.0f;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const float u = load_one<kDtype>(x, r * kLanes + l) * factor;
          sum = sum + u * u;
        }
        partial[l] = sum;
      }
    }
    return;
  }
  for (int l = from; l < to; ++l) partial[l] = 0.0f;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd
    for (int l = from; l < to; ++l) {
      const float u = load_one<kDtype>(x, r * kLanes + l) * factor;
      partial[l] = partial[l] + u * u;
    }
  }
}

HALFSTEP_FN bool exact_enough(float partial) { return partial >= 0x1p-100f && partial <= 0x1p120f; }

// For a group with a partial that float32 cannot hold well (or a NaN): that lane's sum is redone in float64.
// Returns true on a non-finite u.
template <Dtype kDtype>
bool add_group_in_double(const void* x, float factor, int rows, int from, int to, const float* partial, double* lanes) {
  uint32_t any_bits = 0;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd reduction(| : any_bits)
    for (int l = from; l < to; ++l) any_bits |= bits_of(load_one<kDtype>(x, r * kLanes + l) * factor);
  }
  if ((any_bits & 0x7FFFFFFFu) == 0) return false;  // all zeros: nothing to add
  int nonfinite = 0;
  double sums[kLanes];
  for (int l = from; l < to; ++l) sums[l] = 0.0;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd reduction(| : nonfinite)
    for (int l = from; l < to; ++l) {
      const float u = load_one<kDtype>(x, r * kLanes + l) * factor;
      nonfinite |= !is_finite(u);
      sums[l] = sums[l] + static_cast<double>(u) * static_cast<double>(u);
    }
  }
#pragma omp simd
  for (int l = from; l < to; ++l)
    lanes[l] = lanes[l] + (exact_enough(partial[l]) ? static_cast<double>(partial[l]) : sums[l]);
  return nonfinite != 0;
}

// Lanes [from, to) of a group of up to 8 rows of u = x * factor, added to `lanes`. Returns true on a non-finite u.
template <Dtype kDtype, bool kAllRows>
bool add_group(const void* x, float factor, int rows, int from, int to, double* lanes) {
  float partial[kLanes];
  add_squares<kDtype, kAllRows>(x, factor, rows, from, to, partial);
  int outside = 0;
#pragma omp simd reduction(| : outside)
  for (int l = from; l < to; ++l) outside |= !exact_enough(partial[l]);
  if (outside) return add_group_in_double<kDtype>(x, factor, rows, from, to, partial, lanes);
#pragma omp simd
  for (int l = from; l < to; ++l) lanes[l] = lanes[l] + static_cast<double>(partial[l]);
  return false;
}

template <Dtype kDtype>
ChunkStats chunk_stats(const void* x, int64_t n, float factor) {
  const int used = static_cast<int>(n < kLanes ? n : kLanes);
  double lanes[kLanes];
  for (int l = 0; l < used; ++l) lanes[l] = 0.0;
  bool nonfinite = false;
  const int64_t group = static_cast<int64_t>(kRows) * kLanes;
  int64_t done = 0;
  for (; done + group <= n; done += group)
    nonfinite |= add_group<kDtype, true>(at(x, kDtype, done), factor, kRows, 0, kLanes, lanes);
  if (done < n) {  // the lanes of the last, shorter row have one row more than the others
    const int rows = static_cast<int>((n - done) / kLanes), rest = static_cast<int>((n - done) % kLanes);
    const void* tail = at(x, kDtype, done);
    if (rest) nonfinite |= add_group<kDtype, false>(tail, factor, rows + 1, 0, rest, lanes);
    if (rows) nonfinite |= add_group<kDtype, false>(tail, factor, rows, rest, kLanes, lanes);
  }
  for (int s = kLanes / 2; s > 0; s >>= 1) {  // unused lanes hold 0: leaving them out changes no bit
    const int pairs = used - s < s ? used - s : s;
#pragma omp simd
    for (int l = 0; l < pairs; ++l) lanes[l] = lanes[l] + lanes[l + s];
  }
  return {lanes[0], nonfinite};
}

ChunkStats stats(const void* grad, Dtype dtype, int64_t n, float factor) {
  switch (dtype) {
    case Dtype::f32:
      return chunk_stats<Dtype::f32>(grad, n, factor);
    case Dtype::bf16:
      return chunk_stats<Dtype::bf16>(grad, n, factor);
    default:
      return chunk_stats<Dtype::f16>(grad, n, factor);
  }
}

}  // namespace
}  // namespace HALFSTEP_ISA
}  // namespace halfstep
