// Multi-tensor operators of the CUDA backend. All pointers are the device's, all work is put on the caller's stream, and nothing
// waits for it; what a step decides stays on the device.
#pragma once
#include <cstdint>
#include <vector>

#include "adam_math.h"
#include "device.h"
#include "tensor_table.h"

namespace halfstep {

// ---- statistics -------------------------------------------------------------------------------------------------------------
// What the blocks of a first pass leave behind, one entry per chunk.
struct ChunkResults {
  double* sum_squares = nullptr;
  int32_t* tensor = nullptr;  // whose chunk it is; ~tensor if it has a value that is not finite
};

int32_t chunks_of(const std::vector<TensorRef>& tensors, int64_t elements);

// Of u = grad * f32(1 / scale); scale null: 1.
void grad_stats(const std::vector<TensorRef>& grads, const float* scale, const ChunkResults& results,
                const Queue& queue);

// What the prologue makes of them, or is given instead. Each pointer may be null.
struct Stats {
  ChunkResults chunks;
  bool passed = false;   // a pass has filled the chunks, of which there may be none: all tensors are empty
  bool squares = false;  // it has added up squares too
  int32_t chunk_count = 0;
  int32_t tensor_count = 0;
  double* tensor_sums = nullptr;  // [tensor_count]; needed where there are squares
  const double* given_sum_squares = nullptr;
  const int64_t* given_first_nonfinite = nullptr;
  double* sum_squares = nullptr;       // written: of all
  int64_t* first_nonfinite = nullptr;  // written: index of the first tensor with such a value, or -1
};

// ---- step -------------------------------------------------------------------------------------------------------------------
// A parameter group; its lr may be on the device, where a captured graph or a scheduler changes it.
struct DeviceGroup {
  AdamGroup group;
  const void* lr = nullptr;  // null: group.lr counts
  bool lr_is_double = false;
};

// What the update needs of one parameter beside its row, written by the prologue.
struct StepRecord {
  AdamScalars scalars;
  uint32_t t;  // of the random words' key
};

struct Decision {
  float grad_factor;
  int32_t skip;
};

// What a step knows before the update, on the device or from the host, and where its results go.
struct StepPointers {
  const float* scale = nullptr;      // null: 1
  const float* found_inf = nullptr;  // null or <= 0: nobody asks for a skip
  double* norm = nullptr;
  int64_t* skipped = nullptr;  // 0 or 1: a whole word, whose first byte the host reads
  unsigned long long* healed = nullptr;
  Decision* decision = nullptr;
  StepRecord* records = nullptr;  // one per row
};

struct StepOptions {
  double max_norm = -1.0;  // negative: no clipping
  bool skip_nonfinite = false;
  bool stochastic_weight = false;
  bool heal = true;
  uint32_t seed = 0;
};

// Statistics, decision, the counters' advance and the records of all rows. Without rows: the statistics alone.
void prologue(const std::vector<AdamRow>& rows, const std::vector<DeviceGroup>& groups, const Stats& stats,
              const StepPointers& step, const StepOptions& options, const Queue& queue);

void update(const std::vector<AdamRow>& rows, const StepPointers& step, const StepOptions& options, const Queue& queue);

// ---- elementwise ------------------------------------------------------------------------------------------------------------
// x = round(x * factor) in place; results.tensor, by blocks of kBlockElements, says which stored values are not finite.
void scale(const std::vector<TensorRef>& tensors, const float* factor, const ChunkResults& results, const Queue& queue);

// dst[i] = src[i]; stochastic: Philox key (seed, 0), parameter id i, stream 0.
void cast(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, bool stochastic, uint32_t seed,
          const Queue& queue);

// dst[i] = dst[i] + f32(src[i]); dst is float32.
void accumulate(const std::vector<TensorRef>& dst, const std::vector<TensorRef>& src, const Queue& queue);

}  // namespace halfstep
