// Operators that go over each element once: scale, cast, accumulate.
#include "elements.cuh"
#include "multi_tensor.h"

namespace halfstep {
namespace {

// ---- x = round(x * factor) --------------------------------------------------------------------------------------------------
struct ScaleRow {
  void* data;
  int64_t numel;
  int32_t first_block;
  int32_t first_result;  // where this row's blocks write
  int32_t tensor;
  Dtype dtype;
};

// True if a stored value is not finite: what was stored counts, for float16 overflows here.
template <Dtype kDtype>
__device__ __forceinline__ bool scale_share(void* x, const Share& share, float factor) {
  constexpr int kPack = static_cast<int>(16 / item_size(kDtype));
  bool nonfinite = false;
  sweep<kPack>(share.begin, share.n, head_of<kPack>(x, kDtype), [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    Floats<N> values = load<N>(x, kDtype, i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      values.value[k] = values.value[k] * factor;
      const float stored = kDtype == Dtype::f32 ? values.value[k] : widened(narrowed(values.value[k], kDtype), kDtype);
      nonfinite = nonfinite || !is_finite(stored);
    }
    store<N>(x, kDtype, i, values);
  });
  return nonfinite;
}

__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Table<ScaleRow> table, const float* factor, int32_t* results) {
  const Share share = share_of<kBlockElements>(table, static_cast<int>(blockIdx.x));
  const ScaleRow& row = table.row[share.row];
  bool nonfinite;
  if (row.dtype == Dtype::f32)
    nonfinite = scale_share<Dtype::f32>(row.data, share, *factor);
  else if (row.dtype == Dtype::bf16)
    nonfinite = scale_share<Dtype::bf16>(row.data, share, *factor);
  else
    nonfinite = scale_share<Dtype::f16>(row.data, share, *factor);
  nonfinite = __syncthreads_or(nonfinite);
  if (threadIdx.x == 0)
    results[row.first_result + static_cast<int>(share.begin / kBlockElements)] = nonfinite ? ~row.tensor : row.tensor;
}

// ---- dst = round(src) and dst = dst + src -----------------------------------------------------------------------------------
struct PairRow {
  void* dst;
  const void* src;
  int64_t numel;
  int32_t first_block;
  uint32_t tensor;
  Dtype dst_dtype, src_dtype;
};

constexpr int kPairPack = 4;

__device__ __forceinline__ int head_of_pair(const PairRow& row) {
  return common_head(head_of<kPairPack>(row.dst, row.dst_dtype), head_of<kPairPack>(row.src, row.src_dtype));
}

template <Dtype kDst, Dtype kSrc, bool kStochastic>
__device__ __forceinline__ void cast_share(const PairRow& row, const Share& share, uint32_t seed) {
  const RandomKey key{seed, 0, row.tensor, kStreamWeight};
  sweep<kPairPack>(share.begin, share.n, head_of_pair(row), [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    const Floats<N> values = load<N>(row.src, kSrc, i);
    if (kStochastic && kDst != Dtype::f32) {
      const Words<N> words = random_words<N>(key, i);
      store_random<N>(row.dst, kDst, i, values, words);
    } else {
      store<N>(row.dst, kDst, i, values);
    }
  });
}

__host__ __device__ constexpr int pair_of(Dtype dst, Dtype src) {
  return static_cast<int>(dst) * kDtypes + static_cast<int>(src);
}

template <bool kStochastic>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Table<PairRow> table, uint32_t seed) {
  constexpr Dtype f32 = Dtype::f32, bf16 = Dtype::bf16, f16 = Dtype::f16;
  const Share share = share_of<kBlockElements>(table, static_cast<int>(blockIdx.x));
  const PairRow& row = table.row[share.row];
  switch (pair_of(row.dst_dtype, row.src_dtype)) {
    case pair_of(f32, f32):
      return cast_share<f32, f32, kStochastic>(row, share, seed);
    case pair_of(f32, bf16):
      return cast_share<f32, bf16, kStochastic>(row, share, seed);
    case pair_of(f32, f16):
      return cast_share<f32, f16, kStochastic>(row, share, seed);
    case pair_of(bf16, f32):
      return cast_share<bf16, f32, kStochastic>(row, share, seed);
    case pair_of(bf16, bf16):
      return cast_share<bf16, bf16, kStochastic>(row, share, seed);
    case pair_of(bf16, f16):
      return cast_share<bf16, f16, kStochastic>(row, share, seed);
    case pair_of(f16, f32):
      return cast_share<f16, f32, kStochastic>(row, share, seed);
    case pair_of(f16, bf16):
      return cast_share<f16, bf16, kStochastic>(row, share, seed);
    default:
      return cast_share<f16, f16, kStochastic>(row, share, seed);
  }
}

template <Dtype kSrc>
__device__ __forceinline__ void accumulate_share(const PairRow& row, const Share& share) {
  sweep<kPairPack>(share.begin, share.n, head_of_pair(row), [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    Floats<N> sum = load<N>(row.dst, Dtype::f32, i);
    const Floats<N> more = load<N>(row.src, kSrc, i);
#pragma unroll
    for (int k = 0; k < N; ++k) sum.value[k] = sum.value[k] + more.value[k];
    store<N>(row.dst, Dtype::f32, i, sum);
  });
}

__global__ void __launch_bounds__(kThreads) accumulate_kernel(const __grid_constant__ Table<PairRow> table) {
  const Share share = share_of<kBlockElements>(table, static_cast<int>(blockIdx.x));
  const PairRow& row = table.row[share.row];
  if (row.src_dtype == Dtype::f32)
    accumulate_share<Dtype::f32>(row, share);
  else if (row.src_dtype == Dtype::bf16)
    accumulate_share<Dtype::bf16>(row, share);
  else
    accumulate_share<Dtype::f16>(row, share);
}

std::vector<PairRow> pairs(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src) {
  std::vector<PairRow> rows;
  rows.reserve(dst.size());
  for (size_t i = 0; i < dst.size(); ++i)
    if (dst[i].numel > 0)
      rows.push_back({dst[i].data, src[i].data, dst[i].numel, 0, static_cast<uint32_t>(i), dst[i].dtype, src[i].dtype});
  return rows;
}

}  // namespace

void scale(const std::vector<TensorRef>& tensors, const float* factor, const ChunkResults& results,
           const Queue& queue) {
  std::vector<ScaleRow> rows;
  int32_t result = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorRef& t = tensors[i];
    if (t.numel == 0) continue;
    rows.push_back({t.data, t.numel, 0, result, static_cast<int32_t>(i), t.dtype});
    result += static_cast<int32_t>((t.numel + kBlockElements - 1) / kBlockElements);
  }
  for_each_table<kBlockElements>(rows, [&](const Table<ScaleRow>& table, int64_t blocks) {
    launch("unscale_", scale_kernel, blocks, kThreads, queue, table, factor, results.tensor);
  });
}

void cast(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, bool stochastic, uint32_t seed,
          const Queue& queue) {
  for_each_table<kBlockElements>(pairs(dst, src), [&](const Table<PairRow>& table, int64_t blocks) {
    launch("cast_", stochastic ? cast_kernel<true> : cast_kernel<false>, blocks, kThreads, queue, table, seed);
  });
}

void accumulate(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, const Queue& queue) {
  for_each_table<kBlockElements>(pairs(dst, src), [&](const Table<PairRow>& table, int64_t blocks) {
    launch("accumulate_", accumulate_kernel, blocks, kThreads, queue, table);
  });
}

}  // namespace halfstep
