// Layout facts shared by every native backend: dtype codes, one row of the multi-tensor table, the chunk of the contract.
#pragma once
#include <cstdint>

namespace halfstep {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2 };
constexpr int kDtypes = 3;
constexpr int64_t item_size(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

// The global norm's order (and the unit of work): chunks of 65,536 elements, 1,024 lanes, groups of 8 rows.
constexpr int64_t kChunk = 65536;
constexpr int kLanes = 1024;
constexpr int kRows = 8;

// A dense tensor of an operator that takes lists.
struct TensorRef {
  void* data;
  int64_t numel;
  Dtype dtype;
};

// One parameter of the fused update. All tensors of a row are dense and share one element order.
struct AdamRow {
  void* param = nullptr;       // param_dtype
  const void* grad = nullptr;  // grad_dtype
  void* exp_avg = nullptr;     // state_dtype, as the next two
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  // null: no amsgrad
  float* master = nullptr;         // null: none; else the float32 copy of a 16-bit param
  int16_t* remainder = nullptr;    // null: none; else the lower half of a split master (bf16 params)
  int64_t* step = nullptr;         // t, advanced by one unless the step is skipped
  int64_t numel = 0;
  int64_t first_index = 0;  // index of element 0 in the global parameter (stochastic rounding)
  uint32_t param_id = 0;    // position in the optimizer (stochastic rounding)
  int32_t group = 0;        // index into the parameter groups
  Dtype param_dtype = Dtype::f32, grad_dtype = Dtype::f32, state_dtype = Dtype::f32;
};

}  // namespace halfstep
