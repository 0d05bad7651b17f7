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

constexpr float kLeastExact = 0x1p-100f, kMostExact = 0x1p120f;
HALFSTEP_FN bool exact_enough(float partial) { return partial >= kLeastExact && partial <= kMostExact; }

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
  alignas(64) double sums[kLanes];
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
  alignas(64) float partial[kLanes];
  add_squares<kDtype, kAllRows>(x, factor, rows, from, to, partial);
  int outside = 0;
#pragma omp simd reduction(| : outside)
  for (int l = from; l < to; ++l) outside |= !exact_enough(partial[l]);
  if (outside) return add_group_in_double<kDtype>(x, factor, rows, from, to, partial, lanes);
#pragma omp simd
  for (int l = from; l < to; ++l) lanes[l] = lanes[l] + static_cast<double>(partial[l]);
  return false;
}

// A chunk of less than one full group, as most tensors of small models are: a lane is its one partial sum. The first step of
// the tree is done here. Returns false, with nothing done, where float32 cannot hold a partial well.
template <Dtype kDtype>
bool one_group(const void* x, int n, float factor, double* lanes) {
  const int used = n < kLanes ? n : kLanes;
  alignas(64) float partial[kLanes];
  Mask exact = Float{} == 0.0f;  // so far
  int l = 0;
  for (; l + kWidth <= used; l += kWidth) {
    Float sum{};
    int i = l;
    for (; i + kWidth <= n; i += kLanes) {
      const Float u = load<true>(x, kDtype, i, kWidth) * factor;
      sum = sum + u * u;
    }
    if (i < n) {
      const Float u = load<false>(x, kDtype, i, n - i) * factor;
      sum = sum + u * u;
    }
    exact = exact & (sum >= kLeastExact) & (sum <= kMostExact);
    store_lanes<true>(partial + l, sum.lanes, kWidth);
  }
  bool all_exact = all(exact);
  for (; l < used; ++l) {  // only of a chunk of one row
    const float u = load_one<kDtype>(x, l) * factor;
    partial[l] = u * u;
    all_exact = all_exact && exact_enough(partial[l]);
  }
  if (!all_exact) return false;
  const int half = kLanes / 2, pairs = used > half ? used - half : 0;
#pragma omp simd
  for (int k = 0; k < pairs; ++k) lanes[k] = static_cast<double>(partial[k]) + static_cast<double>(partial[k + half]);
#pragma omp simd
  for (int k = pairs; k < (used < half ? used : half); ++k) lanes[k] = static_cast<double>(partial[k]);
  return true;
}

// Lanes beyond `used` are taken as 0, and left out: that changes no bit.
double tree_sum(double* lanes, int used, int first_step) {
  for (int s = first_step; s > 0; s >>= 1) {
    const int pairs = used - s < s ? used - s : s;
#pragma omp simd
    for (int l = 0; l < pairs; ++l) lanes[l] = lanes[l] + lanes[l + s];
  }
  return lanes[0];
}

template <Dtype kDtype>
ChunkStats chunk_stats(const void* x, int64_t n, float factor, Span next) {
  for (int64_t byte = 0; byte < next.bytes; byte += kLine)
    __builtin_prefetch(static_cast<const char*>(next.data) + byte);
  const int used = static_cast<int>(n < kLanes ? n : kLanes);
  alignas(64) double lanes[kLanes];
  const int64_t group = static_cast<int64_t>(kRows) * kLanes;
  if (n < group && one_group<kDtype>(x, static_cast<int>(n), factor, lanes))
    return {tree_sum(lanes, used < kLanes / 2 ? used : kLanes / 2, kLanes / 4), false};
  for (int l = 0; l < used; ++l) lanes[l] = 0.0;
  bool nonfinite = false;
  int64_t done = 0;
  for (; done + group <= n; done += group)
    nonfinite |= add_group<kDtype, true>(at(x, kDtype, done), factor, kRows, 0, kLanes, lanes);
  if (done < n) {  // the lanes of the last, shorter row have one row more than the others
    const int rows = static_cast<int>((n - done) / kLanes), rest = static_cast<int>((n - done) % kLanes);
    const void* tail = at(x, kDtype, done);
    if (rest) nonfinite |= add_group<kDtype, false>(tail, factor, rows + 1, 0, rest, lanes);
    if (rows) nonfinite |= add_group<kDtype, false>(tail, factor, rows, rest, kLanes, lanes);
  }
  return {tree_sum(lanes, used, kLanes / 2), nonfinite};
}

ChunkStats stats(const void* grad, Dtype dtype, int64_t n, float factor, Span next) {
  switch (dtype) {
    case Dtype::f32:
      return chunk_stats<Dtype::f32>(grad, n, factor, next);
    case Dtype::bf16:
      return chunk_stats<Dtype::bf16>(grad, n, factor, next);
    default:
      return chunk_stats<Dtype::f16>(grad, n, factor, next);
  }
}

}  // namespace
}  // namespace HALFSTEP_ISA
}  // namespace halfstep
