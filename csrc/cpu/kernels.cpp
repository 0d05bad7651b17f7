// Compiled once per instruction set with -DHALFSTEP_ISA=<name>; cpu/isa.cpp picks a table at run time. simd.h makes vectors
// of the instruction set's width, the plain loops of grad_stats.h are the compiler's to vectorise, and contraction is off: so
// all of them make the same bits.
// Everything but the table has internal linkage (rounding.h says why).
#include "kernels.h"

#include <type_traits>

#include "convert.h"
#include "grad_stats.h"

namespace halfstep {
namespace HALFSTEP_ISA {
namespace {

// ---- update --------------------------------------------------------------------------------------------------------
// The random words of one block, by stream; null where a tensor rounds to nearest.
struct RandomWords {
  uint32_t buffer[4][kBlock];
  const uint32_t* of[4] = {};

  void draw(const AdamRow& row, const UpdateArgs& args, RandomStream stream, int64_t i) {
    const RandomKey key{args.seed, static_cast<uint32_t>(args.t), row.param_id, stream};
    random_words(buffer[stream], key, row.first_index + i);
    of[stream] = buffer[stream];
  }
};

// The value that the update starts from. A float32 master counts where it still rounds to the weight, bit for bit (any NaN
// matches a NaN), else the weight does; `healed` counts those lanes.
template <bool kWhole>
HALFSTEP_FN Float load_param(const RowKind& kind, const AdamRow& row, int64_t i, int n, Bits& healed) {
  if (kind.remainder) {
    const Bits remainder = (load_words<kWhole>(row.remainder + i, n) ^ 0x8000u) - 0x8000u;  // sign-extended
    return join_master(load_words<kWhole>(at(row.param, Dtype::bf16, i), n), remainder);
  }
  if (!kind.master) return load<kWhole>(row.param, kind.param, i, n);
  const Float master{load_lanes<FloatLanes, kWhole>(row.master + i, n)};
  if (!kind.heal) return master;
  const Bits weight = load_words<kWhole>(at(row.param, kind.param, i), n);
  const bool bf16 = kind.param == Dtype::bf16;
  const Float wide = bf16 ? float_from_bf16(weight) : load<kWhole>(row.param, Dtype::f16, i, n);
  const Bits rounded = bf16 ? bf16_from_float(master) : widen_words(narrow_half(master));
  const Mask stale = (rounded != weight) & ((master == master) | (wide == wide));
  healed = healed - bits_of(stale);
  return select(stale, wide, master);
}

template <bool kWhole>
HALFSTEP_FN void store_param(const RowKind& kind, const AdamRow& row, Float p, const uint32_t* random, int64_t i,
                             int n) {
  if (kind.remainder) {
    Bits weight, remainder;
    split_master(p, weight, remainder);
    store_words<kWhole>(at(row.param, Dtype::bf16, i), weight, n);
    store_words<kWhole>(row.remainder + i, remainder, n);
    return;
  }
  if (kind.master) store_lanes<kWhole>(row.master + i, p.lanes, n);
  store<kWhole>(row.param, kind.param, i, p, random, n);
}

// One vector, or the first n lanes of it. What a row is and has is the same for all its vectors, so the branches are
// predicted, and hidden behind the divisions anyway.
template <bool kWhole>
HALFSTEP_FN void update_vector(const RowKind& kind, const AdamRow& row, const UpdateArgs& args,
                               const RandomWords& random, int offset, int64_t i, int n, Bits& healed) {
  const auto words = [&](RandomStream stream) { return random.of[stream] ? random.of[stream] + offset : nullptr; };
  const Float g = load<kWhole>(row.grad, kind.grad, i, n) * args.grad_factor;
  Float p = load_param<kWhole>(kind, row, i, n, healed);
  Float m = load<kWhole>(row.exp_avg, kind.state, i, n), v = load<kWhole>(row.exp_avg_sq, kind.state, i, n);
  if (kind.amsgrad) {
    Float max_v = load<kWhole>(row.max_exp_avg_sq, kind.state, i, n);
    adam_update(g, p, m, v, &max_v, args.scalars);
    store<kWhole>(row.max_exp_avg_sq, kind.state, i, max_v, words(kStreamMaxExpAvgSq), n);
  } else {
    adam_update<Float>(g, p, m, v, nullptr, args.scalars);
  }
  store_param<kWhole>(kind, row, p, words(kStreamWeight), i, n);
  store<kWhole>(row.exp_avg, kind.state, i, m, words(kStreamExpAvg), n);
  store<kWhole>(row.exp_avg_sq, kind.state, i, v, words(kStreamExpAvgSq), n);
}

// What is left of a block, fewer elements than a vector: rare, so one copy for all kinds.
__attribute__((noinline)) Bits update_rest(const AdamRow& row, const UpdateArgs& args, const RandomWords& random,
                                           int offset, int64_t i, int n) {
  Bits healed{};
  update_vector<false>(kind_of(row, args.heal), row, args, random, offset, i, n, healed);
  return healed;
}

// Asks for memory before it is needed: five streams are more than the hardware follows well, and it cannot know where the
// next tensor lies.
HALFSTEP_FN void prefetch(const void* x, Dtype d, int64_t i, int64_t n) {
  const char* here = at(x, d, i);
  for (int64_t byte = 0; byte < n * item_size(d); byte += kLine) __builtin_prefetch(here + byte);
}

HALFSTEP_FN void prefetch_row(const RowKind& kind, const AdamRow& row, int64_t i, int64_t n) {
  prefetch(row.grad, kind.grad, i, n);
  prefetch(row.param, kind.param, i, n);
  prefetch(row.exp_avg, kind.state, i, n);
  prefetch(row.exp_avg_sq, kind.state, i, n);
  if (kind.amsgrad) prefetch(row.max_exp_avg_sq, kind.state, i, n);
  if (kind.master) prefetch(row.master, Dtype::f32, i, n);
  if (kind.remainder) prefetch(row.remainder, Dtype::bf16, i, n);
}

__attribute__((noinline)) void prefetch_next(const AdamRow& next, int64_t i) {
  const int64_t left = next.numel - i;
  if (left > 0) prefetch_row(kind_of(next, false), next, i, left < kBlock ? left : kBlock);
}

// The block kAhead elements from here, which may be one of the next row.
HALFSTEP_FN void prefetch_ahead(const RowKind& kind, const AdamRow& row, int64_t block, int64_t end,
                                const AdamRow* next) {
  const int64_t ahead = block + kAhead;
  if (ahead + kBlock <= end) {
    prefetch_row(kind, row, ahead, kBlock);
  } else if (next) {
    prefetch_next(*next, ahead < end ? 0 : (ahead - end) / kBlock * kBlock);
  }
}

// By value: the compiler then knows that no store changes them.
HALFSTEP_FN int64_t update_as(const RowKind kind, const AdamRow row, const UpdateArgs args, int64_t begin, int64_t end,
                              const AdamRow* next) {
  const bool bare = kind.param != Dtype::f32 && !kind.master && !kind.remainder;
  RandomWords random;
  Bits healed{};
  for (int64_t block = begin; block < end; block += kBlock) {
    prefetch_ahead(kind, row, block, end, next);
    if (bare && args.stochastic_weight) random.draw(row, args, kStreamWeight, block);
    if (kind.state != Dtype::f32) {
      random.draw(row, args, kStreamExpAvg, block);
      random.draw(row, args, kStreamExpAvgSq, block);
      if (kind.amsgrad) random.draw(row, args, kStreamMaxExpAvgSq, block);
    }
    const int n = static_cast<int>(end - block < kBlock ? end - block : kBlock);
    int k = 0;
    for (; k + kWidth <= n; k += kWidth) update_vector<true>(kind, row, args, random, k, block + k, kWidth, healed);
    if (k < n) healed = healed + update_rest(row, args, random, k, block + k, n - k);
  }
  return sum(healed);
}

// The same code for every kind of row; for the usual ones the compiler removes what they do not need.
int64_t update(const AdamRow& row, const UpdateArgs& args, int64_t begin, int64_t end, const AdamRow* next) {
  const RowKind kind = kind_of(row, args.heal);
  if (kind == usual::plain) return update_as(usual::plain, row, args, begin, end, next);
  if (kind == usual::bf16_master) return update_as(usual::bf16_master, row, args, begin, end, next);
  if (kind == usual::bf16_trusted_master) return update_as(usual::bf16_trusted_master, row, args, begin, end, next);
  if (kind == usual::f16_master) return update_as(usual::f16_master, row, args, begin, end, next);
  if (kind == usual::split_master) return update_as(usual::split_master, row, args, begin, end, next);
  return update_as(kind, row, args, begin, end, next);
}

// ---- scale, cast, accumulate, probe ---------------------------------------------------------------------------------
// Calls body(i, n, whole): whole vectors first, then what is left.
template <class Body>
HALFSTEP_FN void for_each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) body(i, kWidth, std::true_type{});
  if (i < end) body(i, static_cast<int>(end - i), std::false_type{});
}

bool scale(void* x, Dtype dtype, int64_t n, float factor) {
  Bits nonfinite{};
  for_each_vector(0, n, [&](int64_t i, int lanes, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    store<kWhole>(x, dtype, i, load<kWhole>(x, dtype, i, lanes) * factor, nullptr, lanes);
    const Float stored = load<kWhole>(x, dtype, i, lanes);  // what was stored counts: fp16 overflows here
    nonfinite = nonfinite | bits_of((bits_of(stored) & kInfBits) == kInfBits);
  });
  return sum(nonfinite & 1u) != 0;
}

void cast(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t begin, int64_t end,
          const RandomKey* key) {
  uint32_t words[kBlock];
  for (int64_t block = begin; block < end; block += kBlock) {
    if (key) random_words(words, *key, block);
    for_each_vector(block, end - block < kBlock ? end : block + kBlock, [&](int64_t i, int lanes, auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      store<kWhole>(dst, dst_dtype, i, load<kWhole>(src, src_dtype, i, lanes), key ? words + (i - block) : nullptr,
                    lanes);
    });
  }
}

template <Dtype kSource>
void accumulate_from(float* dst, const void* src, int64_t begin, int64_t end) {
  for_each_vector(begin, end, [&](int64_t i, int lanes, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    const Float sum = load<kWhole>(dst, Dtype::f32, i, lanes) + load<kWhole>(src, kSource, i, lanes);
    store_lanes<kWhole>(dst + i, sum.lanes, lanes);
  });
}

void accumulate(float* dst, const void* src, Dtype src_dtype, int64_t begin, int64_t end) {
  switch (src_dtype) {
    case Dtype::f32:
      return accumulate_from<Dtype::f32>(dst, src, begin, end);
    case Dtype::bf16:
      return accumulate_from<Dtype::bf16>(dst, src, begin, end);
    default:
      return accumulate_from<Dtype::f16>(dst, src, begin, end);
  }
}

void probe(float* p, const float* g, float* m, float* v, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = g[i];
    p[i] += x;
    m[i] += x;
    v[i] += x;
  }
}

}  // namespace

#define HALFSTEP_STRING_(x) #x
#define HALFSTEP_STRING(x) HALFSTEP_STRING_(x)
extern const Kernels kernels;
const Kernels kernels = {HALFSTEP_STRING(HALFSTEP_ISA), update, stats, scale, cast, accumulate, probe};

}  // namespace HALFSTEP_ISA
}  // namespace halfstep
