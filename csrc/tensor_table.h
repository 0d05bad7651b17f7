// Layout facts shared by every native backend: dtype codes, one row of the multi-tensor table, the chunk of the contract.
#pragma once
#include <cstdint>

#include "rounding.h"

namespace halfstep {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2 };
constexpr int kDtypes = 3;
HALFSTEP_FN constexpr int64_t item_size(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

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

// What a row consists of. A backend compiles its update for the usual kinds, where the branches on it are gone, and once for
// any kind.
struct RowKind {
  Dtype param, grad, state;
  bool master, remainder, amsgrad, heal;

  bool operator==(const RowKind& other) const {
    return param == other.param && grad == other.grad && state == other.state && master == other.master &&
           remainder == other.remainder && amsgrad == other.amsgrad && heal == other.heal;
  }
};

inline RowKind kind_of(const AdamRow& row, bool heal) {
  return {row.param_dtype,
          row.grad_dtype,
          row.state_dtype,
          row.master != nullptr,
          row.remainder != nullptr,
          row.max_exp_avg_sq != nullptr,
          row.master != nullptr && heal};
}

namespace usual {
constexpr RowKind plain{Dtype::f32, Dtype::f32, Dtype::f32, false, false, false, false};
constexpr RowKind bf16_master{Dtype::bf16, Dtype::bf16, Dtype::f32, true, false, false, true};
constexpr RowKind bf16_trusted_master{Dtype::bf16, Dtype::bf16, Dtype::f32, true, false, false, false};
constexpr RowKind f16_master{Dtype::f16, Dtype::f16, Dtype::f32, true, false, false, true};
constexpr RowKind split_master{Dtype::bf16, Dtype::bf16, Dtype::f32, false, true, false, false};
}  // namespace usual

}  // namespace halfstep
