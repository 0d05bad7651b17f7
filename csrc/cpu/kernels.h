// The inner loops of the CPU backend, one table of them per instruction set. kernels.cpp is compiled once for each.
#pragma once
#include "adam_math.h"
#include "philox.h"
#include "tensor_table.h"

namespace halfstep {

// What update needs beside the row; scalars belong to the row's tensor.
struct UpdateArgs {
  AdamScalars scalars;
  float grad_factor;
  int64_t t;
  uint32_t seed;
  bool stochastic_weight;  // 16-bit weights without a master round stochastically
  bool heal;               // a fp32 master that no longer rounds to the weight gives way to the weight
};

struct ChunkStats {
  double sum_squares;
  bool nonfinite;
};

struct Span {
  const void* data = nullptr;
  int64_t bytes = 0;
};

struct Kernels {
  const char* name;
  // Elements [begin, end) of the row. Returns how many masters were healed. `next` (may be null): what comes after it.
  int64_t (*update)(const AdamRow& row, const UpdateArgs& args, int64_t begin, int64_t end, const AdamRow* next);
  // One chunk (n <= kChunk) of grad * factor: its sum of squares in the contract's order. `next`: memory that is
  // read after it.
  ChunkStats (*stats)(const void* grad, Dtype dtype, int64_t n, float factor, Span next);
  // x = round(x * factor) in place; true if a stored value is not finite.
  bool (*scale)(void* x, Dtype dtype, int64_t n, float factor);
  // dst = src, elements [begin, end); `key` null: nearest.
  void (*cast)(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t begin, int64_t end,
               const RandomKey* key);
  // dst = dst + src in float32, elements [begin, end); the two may be the same memory.
  void (*accumulate)(float* dst, const void* src, Dtype src_dtype, int64_t begin, int64_t end);
  // Adam's traffic without its arithmetic, 28 bytes per element: what the machine can do (benches only).
  void (*probe)(float* p, const float* g, float* m, float* v, int64_t n);
};

#define HALFSTEP_DECLARE_ISA(isa) \
  namespace isa {                 \
  extern const Kernels kernels;   \
  }
HALFSTEP_DECLARE_ISA(baseline)
HALFSTEP_DECLARE_ISA(avx2)
HALFSTEP_DECLARE_ISA(avx512)
HALFSTEP_DECLARE_ISA(neon)
#undef HALFSTEP_DECLARE_ISA

}  // namespace halfstep
