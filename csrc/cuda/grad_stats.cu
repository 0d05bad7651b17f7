// First pass: each block adds up the squares of one chunk, in the contract's order, and looks whether all are finite.
#include "elements.cuh"
#include "multi_tensor.h"

namespace halfstep {
namespace {

constexpr int kLanesPerThread = 8;
constexpr int kStatsThreads = kLanes / kLanesPerThread;
constexpr float kLeastExact = 0x1p-100f, kMostExact = 0x1p120f;

struct StatsRow {
  const void* data;
  int64_t numel;
  int32_t first_block;
  int32_t first_chunk;  // of all tensors' chunks
  int32_t tensor;
  Dtype dtype;
};
static_assert(Table<StatsRow>::kCapacity >= 1000);  // one launch

// Eight elements from i on, those that exist; the others are 0, which adds nothing.
template <Dtype kDtype>
__device__ __forceinline__ Floats<kLanesPerThread> load_lanes(const void* x, int i, int n, float factor, bool aligned) {
  Floats<kLanesPerThread> u = {};
  if (aligned && i + kLanesPerThread <= n) {
    u = load<kLanesPerThread>(x, kDtype, i);
#pragma unroll
    for (int k = 0; k < kLanesPerThread; ++k) u.value[k] = u.value[k] * factor;
  } else {
#pragma unroll
    for (int k = 0; k < kLanesPerThread; ++k)
      if (i + k < n) u.value[k] = load<1>(x, kDtype, i + k).value[0] * factor;
  }
  return u;
}

__device__ __forceinline__ bool exact_enough(float partial) { return partial >= kLeastExact && partial <= kMostExact; }

// The group's sum for one lane in float64, where float32 does not hold it well (or the lane has a NaN, or only zeros).
struct LaneSum {
  double sum = 0.0;
  bool nonfinite = false;
};
template <Dtype kDtype>
__device__ __noinline__ LaneSum sum_in_double(const void* x, int i, int n, float factor) {
  LaneSum lane;
  for (int r = 0; r < kRows && i + r * kLanes < n; ++r) {
    const float u = load<1>(x, kDtype, i + r * kLanes).value[0] * factor;
    lane.nonfinite = lane.nonfinite || !is_finite(u);
    lane.sum = lane.sum + static_cast<double>(u) * static_cast<double>(u);
  }
  return lane;
}

// Thread t adds up lanes 8t to 8t + 7, so that it reads them at once.
template <Dtype kDtype>
__device__ __forceinline__ bool add_lanes(const void* x, int n, float factor, double* lanes) {
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const int first = static_cast<int>(threadIdx.x) * kLanesPerThread;
  bool nonfinite = false;
  double sums[kLanesPerThread] = {};
  for (int group = first; group < n; group += kRows * kLanes) {
    Floats<kLanesPerThread> rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = load_lanes<kDtype>(x, group + r * kLanes, n, factor, aligned);
#pragma unroll
    for (int k = 0; k < kLanesPerThread; ++k) {
      float partial = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) partial = partial + rows[r].value[k] * rows[r].value[k];
      if (exact_enough(partial)) {
        sums[k] = sums[k] + static_cast<double>(partial);
      } else if (group + k < n) {
        const LaneSum lane = sum_in_double<kDtype>(x, group + k, n, factor);
        sums[k] = sums[k] + lane.sum;
        nonfinite = nonfinite || lane.nonfinite;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kLanesPerThread; ++k) lanes[first + k] = sums[k];
  return nonfinite;
}

__global__ void __launch_bounds__(kStatsThreads)
    grad_stats_kernel(const __grid_constant__ Table<StatsRow> table, const float* scale, ChunkResults results) {
  __shared__ double lanes[kLanes];
  __shared__ float factor;
  if (threadIdx.x == 0) factor = scale ? inverse(*scale) : 1.0f;
  __syncthreads();
  const Share share = share_of<kChunk>(table, static_cast<int>(blockIdx.x));
  const StatsRow& row = table.row[share.row];
  const char* x = at(row.data, row.dtype, share.begin);
  bool nonfinite;
  if (row.dtype == Dtype::f32)
    nonfinite = add_lanes<Dtype::f32>(x, share.n, factor, lanes);
  else if (row.dtype == Dtype::bf16)
    nonfinite = add_lanes<Dtype::bf16>(x, share.n, factor, lanes);
  else
    nonfinite = add_lanes<Dtype::f16>(x, share.n, factor, lanes);
  nonfinite = __syncthreads_or(nonfinite);
  for (int s = kLanes / 2; s > 0; s /= 2) {
    for (int l = static_cast<int>(threadIdx.x); l < s; l += kStatsThreads) lanes[l] = lanes[l] + lanes[l + s];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const int chunk = row.first_chunk + static_cast<int>(share.begin / kChunk);
    results.sum_squares[chunk] = lanes[0];
    results.tensor[chunk] = nonfinite ? ~row.tensor : row.tensor;
  }
}

}  // namespace

int32_t chunks_of(const std::vector<TensorRef>& tensors, int64_t elements) {
  int64_t chunks = 0;
  for (const TensorRef& t : tensors) chunks += (t.numel + elements - 1) / elements;
  if (chunks > INT32_MAX) throw std::length_error("halfstep: the tensors are too large for one call");
  return static_cast<int32_t>(chunks);
}

void grad_stats(const std::vector<TensorRef>& grads, const float* scale, const ChunkResults& results,
                const Queue& queue) {
  std::vector<StatsRow> rows;
  int32_t chunk = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    const TensorRef& g = grads[i];
    if (g.numel == 0) continue;
    rows.push_back({g.data, g.numel, 0, chunk, static_cast<int32_t>(i), g.dtype});
    chunk += static_cast<int32_t>((g.numel + kChunk - 1) / kChunk);
  }
  for_each_table<kChunk>(rows, [&](const Table<StatsRow>& table, int64_t blocks) {
    launch("grad_stats", grad_stats_kernel, blocks, kStatsThreads, queue, table, scale, results);
  });
}

}  // namespace halfstep
