#include "multi_tensor.h"

#include <algorithm>
#include <atomic>

#include "ieee_mode.h"
#include "philox.h"

namespace halfstep {
namespace {

// Chosen, not measured: below it, waking a second thread should cost more than it brings.
constexpr int64_t kSerial = 32768;

// Of the next gradient, asked for while one is added up: the hardware cannot know where it lies.
constexpr int64_t kNextBytes = 8192;

// Element offsets of the tensors laid end to end: start[i] .. start[i + 1].
template <class Sizes>
std::vector<int64_t> starts(size_t count, Sizes numel) {
  std::vector<int64_t> start(count + 1, 0);
  for (size_t i = 0; i < count; ++i) start[i + 1] = start[i] + numel(i);
  return start;
}

// Calls work(unit) for each unit of 64K elements of the whole list, dynamically scheduled.
template <class Work>
void for_each_unit(int64_t total, Run run, Work work) {
  const int64_t units = (total + kChunk - 1) / kChunk;
#pragma omp parallel num_threads(run.threads) if (total > kSerial && run.threads > 1)
  {
    IeeeMode mode;
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
  }
}

// Calls body(tensor, begin, end) for the pieces of tensors that make up the unit.
template <class Body>
void for_each_piece(const std::vector<int64_t>& start, int64_t unit, Body body) {
  int64_t at = unit * kChunk;
  const int64_t stop = std::min(at + kChunk, start.back());
  size_t i = static_cast<size_t>(std::upper_bound(start.begin(), start.end(), at) - start.begin()) - 1;
  for (; at < stop; ++i) {
    const int64_t end = std::min(stop, start[i + 1]);
    if (end > at) body(i, at - start[i], end - start[i]);
    at = std::max(at, end);
  }
}

void lower_to(std::atomic<int64_t>& lowest, int64_t value) {
  int64_t seen = lowest.load();
  while (value < seen && !lowest.compare_exchange_weak(seen, value)) {
  }
}

char* at(const TensorRef& t, int64_t i) { return static_cast<char*>(t.data) + i * item_size(t.dtype); }

}  // namespace

GradStats grad_stats(const std::vector<TensorRef>& grads, float factor, Run run, double* sums) {
  const std::vector<int64_t> start = starts(grads.size(), [&](size_t i) { return grads[i].numel; });
  const std::vector<int64_t> first_chunk =
      starts(grads.size(), [&](size_t i) { return (grads[i].numel + kChunk - 1) / kChunk; });
  std::vector<double> chunk_sums(static_cast<size_t>(first_chunk.back()));
  std::atomic<int64_t> first_nonfinite{INT64_MAX};
  // A unit takes the chunks that begin inside it: chunks never straddle tensors, units may.
  for_each_unit(start.back(), run, [&](int64_t unit) {
    for_each_piece(start, unit, [&](size_t i, int64_t begin, int64_t end) {
      for (int64_t c = (begin + kChunk - 1) / kChunk; c * kChunk < end; ++c) {
        const int64_t n = std::min(kChunk, grads[i].numel - c * kChunk);
        Span next;
        if (i + 1 < grads.size())
          next = {grads[i + 1].data, std::min(kNextBytes, grads[i + 1].numel * item_size(grads[i + 1].dtype))};
        const ChunkStats s = run.kernels->stats(at(grads[i], c * kChunk), grads[i].dtype, n, factor, next);
        chunk_sums[static_cast<size_t>(first_chunk[i] + c)] = s.sum_squares;
        if (s.nonfinite) lower_to(first_nonfinite, static_cast<int64_t>(i));
      }
    });
  });
  const IeeeMode mode;
  GradStats out;
  for (size_t i = 0; i < grads.size(); ++i) {
    double tensor = 0.0;
    for (int64_t c = first_chunk[i]; c < first_chunk[i + 1]; ++c) tensor += chunk_sums[static_cast<size_t>(c)];
    if (sums) sums[i] = tensor;
    out.sum_squares += tensor;
  }
  const int64_t lowest = first_nonfinite.load();
  out.first_nonfinite = lowest == INT64_MAX ? -1 : lowest;
  return out;
}

int64_t scale(const std::vector<TensorRef>& tensors, float factor, Run run) {
  const std::vector<int64_t> start = starts(tensors.size(), [&](size_t i) { return tensors[i].numel; });
  std::atomic<int64_t> first_nonfinite{INT64_MAX};
  for_each_unit(start.back(), run, [&](int64_t unit) {
    for_each_piece(start, unit, [&](size_t i, int64_t begin, int64_t end) {
      if (run.kernels->scale(at(tensors[i], begin), tensors[i].dtype, end - begin, factor))
        lower_to(first_nonfinite, static_cast<int64_t>(i));
    });
  });
  const int64_t lowest = first_nonfinite.load();
  return lowest == INT64_MAX ? -1 : lowest;
}

void cast(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, bool stochastic, uint32_t seed,
          Run run) {
  const std::vector<int64_t> start = starts(dst.size(), [&](size_t i) { return dst[i].numel; });
  for_each_unit(start.back(), run, [&](int64_t unit) {
    for_each_piece(start, unit, [&](size_t i, int64_t begin, int64_t end) {
      const RandomKey key{seed, 0, static_cast<uint32_t>(i), kStreamWeight};
      run.kernels->cast(dst[i].data, dst[i].dtype, src[i].data, src[i].dtype, begin, end, stochastic ? &key : nullptr);
    });
  });
}

void accumulate(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, Run run) {
  const std::vector<int64_t> start = starts(dst.size(), [&](size_t i) { return dst[i].numel; });
  for_each_unit(start.back(), run, [&](int64_t unit) {
    for_each_piece(start, unit, [&](size_t i, int64_t begin, int64_t end) {
      run.kernels->accumulate(static_cast<float*>(dst[i].data), src[i].data, src[i].dtype, begin, end);
    });
  });
}

int64_t adam(const std::vector<AdamRow>& rows, const std::vector<AdamGroup>& groups, const AdamOptions& options,
             Run run) {
  const IeeeMode mode;
  std::vector<UpdateArgs> args(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t group = rows[i].group;
    const int64_t t = *rows[i].step + 1;
    UpdateArgs& a = args[i];
    if (i > 0 && group == rows[i - 1].group && t == args[i - 1].t) {
      a = args[i - 1];  // the usual case: everyone of a group is at the same step
    } else {
      const AdamScalars scalars = adam_scalars(groups[static_cast<size_t>(group)], t);
      a = {scalars, options.grad_factor, t, options.seed, options.stochastic_weight, options.heal};
    }
  }
  const std::vector<int64_t> start = starts(rows.size(), [&](size_t i) { return rows[i].numel; });
  std::atomic<int64_t> healed{0};
  for_each_unit(start.back(), run, [&](int64_t unit) {
    int64_t count = 0;
    for_each_piece(start, unit, [&](size_t i, int64_t begin, int64_t end) {
      const AdamRow* next = i + 1 < rows.size() ? &rows[i + 1] : nullptr;
      count += run.kernels->update(rows[i], args[i], begin, end, next);
    });
    if (count) healed += count;
  });
  for (size_t i = 0; i < rows.size(); ++i) *rows[i].step = args[i].t;
  return healed.load();
}

void probe(float* p, const float* g, float* m, float* v, int64_t n, Run run) {
  for_each_unit(n, run, [&](int64_t unit) {
    const int64_t i = unit * kChunk;
    run.kernels->probe(p + i, g + i, m + i, v + i, std::min(kChunk, n - i));
  });
}

}  // namespace halfstep
