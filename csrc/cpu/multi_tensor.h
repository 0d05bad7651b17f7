// Multi-tensor operators of the CPU backend: whole lists of tensors in one parallel region each.
#pragma once
#include <string>
#include <vector>

#include "adam_math.h"
#include "kernels.h"
#include "tensor_table.h"

namespace halfstep {

// How to run: torch.get_num_threads() and the instruction set's table (isa.h).
struct Run {
  int threads;
  const Kernels* kernels;
};

struct GradStats {
  double sum_squares = 0.0;
  int64_t first_nonfinite = -1;  // index of the first tensor with a non-finite value
};

// Of u = grad * factor, in the contract's order (chunks, lanes, groups of 8 rows, tree).
// `sums`, unless null, receives the sum of squares of each tensor.
GradStats grad_stats(const std::vector<TensorRef>& grads, float factor, Run run, double* sums = nullptr);

// x = round(x * factor) in place; returns the index of the first tensor with a non-finite stored value, or -1.
int64_t scale(const std::vector<TensorRef>& tensors, float factor, Run run);

// dst[i] = src[i]; stochastic: Philox key (seed, 0), parameter id i, stream 0.
void cast(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, bool stochastic, uint32_t seed,
          Run run);

// dst[i] = dst[i] + src[i] in float32, rounded once; dst[i] is float32, and may be src[i].
void accumulate(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, Run run);

struct AdamOptions {
  float grad_factor = 1.0f;
  uint32_t seed = 0;
  bool stochastic_weight = false;
  bool heal = true;
};

// One step of every row; advances the step counters. Returns how many masters were healed.
int64_t adam(const std::vector<AdamRow>& rows, const std::vector<AdamGroup>& groups, const AdamOptions& options,
             Run run);

void probe(float* p, const float* g, float* m, float* v, int64_t n, Run run);

}  // namespace halfstep
