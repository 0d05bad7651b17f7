// Compiled once per instruction set with -DHALFSTEP_ISA=<name>; cpu/isa.cpp picks a table at run time. Plain loops over
// blocks: the compiler vectorises them for the flags at hand, and contraction is off, so all of them make the same bits.
// Everything but the table has internal linkage (rounding.h says why).
#include "kernels.h"

#include "convert.h"

namespace halfstep {
namespace HALFSTEP_ISA {
namespace {

// ---- update --------------------------------------------------------------------------------------------------------
// p_in may be p_out.
template <bool kL2, bool kAmsgrad, bool kLerpFromGrad>
void adam_block(const float* g, const float* p_in, float* p_out, float* m, float* v, float* max_v, int n,
                const UpdateArgs& args) {
  const AdamScalars s = args.scalars;
  const float factor = args.grad_factor;
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    float p = p_in[i], mi = m[i], vi = v[i];
    float max_vi = kAmsgrad ? max_v[i] : 0.0f;
    adam_update<kL2, kAmsgrad, kLerpFromGrad>(g[i] * factor, p, mi, vi, max_vi, s);
    p_out[i] = p;
    m[i] = mi;
    v[i] = vi;
    if (kAmsgrad) max_v[i] = max_vi;
  }
}

using BlockFn = void (*)(const float*, const float*, float*, float*, float*, float*, int, const UpdateArgs&);

BlockFn block_for(bool l2, bool amsgrad, bool lerp_from_grad) {
  static constexpr BlockFn table[8] = {adam_block<false, false, false>, adam_block<false, false, true>,
                                       adam_block<false, true, false>,  adam_block<false, true, true>,
                                       adam_block<true, false, false>,  adam_block<true, false, true>,
                                       adam_block<true, true, false>,   adam_block<true, true, true>};
  return table[(l2 ? 4 : 0) + (amsgrad ? 2 : 0) + (lerp_from_grad ? 1 : 0)];
}

// The master where it still rounds to the weight, bit for bit (any NaN matches a NaN), else the weight.
template <Dtype kDtype>
int heal_block(const float* master, const uint16_t* weight, float* out, int n) {
  int healed = 0;
#pragma omp simd reduction(+ : healed)
  for (int i = 0; i < n; ++i) {
    const float x = master[i];
    const uint32_t w = weight[i];
    const uint32_t rounded = kDtype == Dtype::bf16 ? bf16_from_float(x) : half_from_float(x);
    const float wide =
        kDtype == Dtype::bf16 ? float_from_bf16(static_cast<uint16_t>(w)) : float_from_half(static_cast<uint16_t>(w));
    const int stale = (rounded != w) & ((x == x) | (wide == wide));
    out[i] = stale ? wide : x;
    healed += stale;
  }
  return healed;
}

int64_t update(const AdamRow& row, const UpdateArgs& args, int64_t begin, int64_t end) {
  const BlockFn adam = block_for(args.l2, row.max_exp_avg_sq != nullptr, args.scalars.one_minus_beta1 >= 0.5f);
  const auto key = [&](RandomStream stream) {
    return RandomKey{args.seed, static_cast<uint32_t>(args.t), row.param_id, stream};
  };
  const RandomKey weight_key = key(kStreamWeight), m_key = key(kStreamExpAvg), v_key = key(kStreamExpAvgSq),
                  max_key = key(kStreamMaxExpAvgSq);
  const bool narrow_state = row.state_dtype != Dtype::f32;
  float g_buffer[kBlock], p_buffer[kBlock], m_buffer[kBlock], v_buffer[kBlock], max_buffer[kBlock];
  int64_t healed = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int n = static_cast<int>(end - i < kBlock ? end - i : kBlock);
    const int64_t first = row.first_index + i;
    char* param = at(row.param, row.param_dtype, i);
    uint16_t* weight = reinterpret_cast<uint16_t*>(param);  // if the param is 16-bit
    const float* g = widen(at(row.grad, row.grad_dtype, i), row.grad_dtype, g_buffer, n);
    float* m = widen(at(row.exp_avg, row.state_dtype, i), row.state_dtype, m_buffer, n);
    float* v = widen(at(row.exp_avg_sq, row.state_dtype, i), row.state_dtype, v_buffer, n);
    float* max_v = row.max_exp_avg_sq
                       ? widen(at(row.max_exp_avg_sq, row.state_dtype, i), row.state_dtype, max_buffer, n)
                       : nullptr;
    const float* p_in;
    float* p_out = p_buffer;
    if (row.master) {
      p_in = p_out = row.master + i;
      if (args.heal) {
        healed += row.param_dtype == Dtype::bf16 ? heal_block<Dtype::bf16>(p_out, weight, p_buffer, n)
                                                 : heal_block<Dtype::f16>(p_out, weight, p_buffer, n);
        p_in = p_buffer;
      }
    } else if (row.remainder) {
      const int16_t* remainder = row.remainder + i;
#pragma omp simd
      for (int k = 0; k < n; ++k) p_buffer[k] = join_master(weight[k], remainder[k]);
      p_in = p_buffer;
    } else {
      p_in = p_out = widen(param, row.param_dtype, p_buffer, n);
    }

    adam(g, p_in, p_out, m, v, max_v, n, args);

    if (row.remainder) {
      int16_t* remainder = row.remainder + i;
#pragma omp simd
      for (int k = 0; k < n; ++k) split_master(p_out[k], weight + k, remainder + k);
    } else if (row.param_dtype != Dtype::f32) {
      const bool stochastic = args.stochastic_weight && !row.master;
      narrow(p_out, param, row.param_dtype, n, stochastic ? &weight_key : nullptr, first);
    }
    if (narrow_state) {
      narrow(m, at(row.exp_avg, row.state_dtype, i), row.state_dtype, n, &m_key, first);
      narrow(v, at(row.exp_avg_sq, row.state_dtype, i), row.state_dtype, n, &v_key, first);
      if (max_v) narrow(max_v, at(row.max_exp_avg_sq, row.state_dtype, i), row.state_dtype, n, &max_key, first);
    }
  }
  return healed;
}

// ---- stats ---------------------------------------------------------------------------------------------------------
template <Dtype kDtype>
HALFSTEP_FN float load(const void* x, int64_t i) {
  if (kDtype == Dtype::f32) return static_cast<const float*>(x)[i];
  const uint16_t h = static_cast<const uint16_t*>(x)[i];
  return kDtype == Dtype::bf16 ? float_from_bf16(h) : float_from_half(h);
}

// partial[l] = sum over the rows of u * u, in float32 and row order. kAllRows: the 8 rows of a full group, in registers.
template <Dtype kDtype, bool kAllRows>
HALFSTEP_FN void add_squares(const void* x, float factor, int rows, int from, int to, float* partial) {
  if (kAllRows) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      float sum = 0.0f;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const float u = load<kDtype>(x, r * kLanes + l) * factor;
        sum = sum + u * u;
      }
      partial[l] = sum;
    }
    return;
  }
  for (int l = from; l < to; ++l) partial[l] = 0.0f;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd
    for (int l = from; l < to; ++l) {
      const float u = load<kDtype>(x, r * kLanes + l) * factor;
      partial[l] = partial[l] + u * u;
    }
  }
}

HALFSTEP_FN bool exact_enough(float partial) { return partial >= 0x1p-100f && partial <= 0x1p120f; }

// For a group with a partial that float32 cannot hold well (or a NaN): that lane's sum is redone in float64.
// Returns true on a non-finite u.
template <Dtype kDtype>
bool add_group_in_double(const void* x, float factor, int rows, int from, int to, const float* partial, double* lanes) {
  uint32_t any_bits = 0;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd reduction(| : any_bits)
    for (int l = from; l < to; ++l) any_bits |= bits_of(load<kDtype>(x, r * kLanes + l) * factor);
  }
  if ((any_bits & 0x7FFFFFFFu) == 0) return false;  // all zeros: nothing to add
  int nonfinite = 0;
  double sums[kLanes];
  for (int l = from; l < to; ++l) sums[l] = 0.0;
  for (int r = 0; r < rows; ++r) {
#pragma omp simd reduction(| : nonfinite)
    for (int l = from; l < to; ++l) {
      const float u = load<kDtype>(x, r * kLanes + l) * factor;
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
  float partial[kLanes];
  add_squares<kDtype, kAllRows>(x, factor, rows, from, to, partial);
  int outside = 0;
#pragma omp simd reduction(| : outside)
  for (int l = from; l < to; ++l) outside |= !exact_enough(partial[l]);
  if (outside) return add_group_in_double<kDtype>(x, factor, rows, from, to, partial, lanes);
#pragma omp simd
  for (int l = from; l < to; ++l) lanes[l] = lanes[l] + static_cast<double>(partial[l]);
  return false;
}

template <Dtype kDtype>
ChunkStats chunk_stats(const void* x, int64_t n, float factor) {
  const int used = static_cast<int>(n < kLanes ? n : kLanes);
  double lanes[kLanes];
  for (int l = 0; l < used; ++l) lanes[l] = 0.0;
  bool nonfinite = false;
  const int64_t group = static_cast<int64_t>(kRows) * kLanes;
  int64_t done = 0;
  for (; done + group <= n; done += group)
    nonfinite |= add_group<kDtype, true>(at(x, kDtype, done), factor, kRows, 0, kLanes, lanes);
  if (done < n) {  // the lanes of the last, shorter row have one row more than the others
    const int rows = static_cast<int>((n - done) / kLanes), rest = static_cast<int>((n - done) % kLanes);
    const void* tail = at(x, kDtype, done);
    if (rest) nonfinite |= add_group<kDtype, false>(tail, factor, rows + 1, 0, rest, lanes);
    if (rows) nonfinite |= add_group<kDtype, false>(tail, factor, rows, rest, kLanes, lanes);
  }
  for (int s = kLanes / 2; s > 0; s >>= 1) {  // unused lanes hold 0: leaving them out changes no bit
    const int pairs = used - s < s ? used - s : s;
#pragma omp simd
    for (int l = 0; l < pairs; ++l) lanes[l] = lanes[l] + lanes[l + s];
  }
  return {lanes[0], nonfinite};
}

ChunkStats stats(const void* grad, Dtype dtype, int64_t n, float factor) {
  switch (dtype) {
    case Dtype::f32:
      return chunk_stats<Dtype::f32>(grad, n, factor);
    case Dtype::bf16:
      return chunk_stats<Dtype::bf16>(grad, n, factor);
    default:
      return chunk_stats<Dtype::f16>(grad, n, factor);
  }
}

// ---- scale, cast, probe --------------------------------------------------------------------------------------------
int scale_block(float* x, int n, float factor) {
  int nonfinite = 0;
#pragma omp simd reduction(| : nonfinite)
  for (int i = 0; i < n; ++i) {
    const float u = x[i] * factor;
    nonfinite |= !is_finite(u);
    x[i] = u;
  }
  return nonfinite;
}

bool scale(void* x, Dtype dtype, int64_t n, float factor) {
  float buffer[kBlock];
  int nonfinite = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int count = static_cast<int>(n - i < kBlock ? n - i : kBlock);
    void* here = at(x, dtype, i);
    float* u = widen(here, dtype, buffer, count);
    nonfinite |= scale_block(u, count, factor);
    if (dtype == Dtype::f32) continue;
    narrow(u, here, dtype, count, nullptr, 0);
    const uint16_t* stored = static_cast<const uint16_t*>(here);
    const uint16_t exponent = dtype == Dtype::bf16 ? 0x7F80 : 0x7C00;  // what was stored counts: fp16 overflows here
    int overflow = 0;
#pragma omp simd reduction(| : overflow)
    for (int k = 0; k < count; ++k) overflow |= (stored[k] & exponent) == exponent;
    nonfinite |= overflow;
  }
  return nonfinite != 0;
}

void cast(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t begin, int64_t end,
          const RandomKey* key) {
  float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int n = static_cast<int>(end - i < kBlock ? end - i : kBlock);
    const float* x = widen(at(src, src_dtype, i), src_dtype, buffer, n);
    void* out = at(dst, dst_dtype, i);
    if (dst_dtype == Dtype::f32)
      memcpy(out, x, sizeof(float) * static_cast<size_t>(n));
    else
      narrow(x, out, dst_dtype, n, key, i);
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
const Kernels kernels = {HALFSTEP_STRING(HALFSTEP_ISA), update, stats, scale, cast, probe};

}  // namespace HALFSTEP_ISA
}  // namespace halfstep
