// The arithmetic of Adam and AdamW, once, for every native backend (Kingma & Ba 2015; Loshchilov & Hutter 2019; amsgrad:
// Reddi et al. 2018). Each operation is rounded on its own, in the order written here: build with contraction off
// (-ffp-contract=off, --fmad=false). python/halfstep/reference/optimizer.py says the same in PyTorch.
#pragma once
#include <cmath>
#include <cstdint>

#include "rounding.h"

namespace halfstep {

// Hyper-parameters of one parameter group, as the user gave them.
struct AdamGroup {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW: p *= 1 - lr * weight_decay; otherwise Adam's L2 term g += weight_decay * p
  bool maximize;
};

// What the update needs of one tensor; every field is a float64 value rounded once.
struct AdamScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float weight_decay;  // of the L2 term; 0 where there is none
  float decay;         // 1 - lr * weight_decay; 1 where there is none
  float step_size;     // lr / (1 - beta1^t)
  float sqrt_bias_correction2;
  uint32_t grad_sign;   // 0x80000000 flips the gradient (maximize)
  bool l2;              // there is an L2 term
  bool lerp_from_grad;  // torch.lerp's branch for 1 - beta1 >= 0.5
};

// A fixed sequence of multiplications, so that every backend agrees on the last bit (pow() of two libraries may not).
HALFSTEP_FN double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

HALFSTEP_FN AdamScalars adam_scalars(const AdamGroup& h, int64_t t) {
  const float weight_decay = static_cast<float>(h.weight_decay);
  const bool decays = weight_decay != 0.0f;
  AdamScalars s;
  s.beta1 = static_cast<float>(h.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  s.beta2 = static_cast<float>(h.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  s.eps = static_cast<float>(h.eps);
  s.weight_decay = h.decoupled ? 0.0f : weight_decay;
  s.decay = h.decoupled && decays ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0f;
  s.step_size = static_cast<float>(h.lr / (1.0 - power(h.beta1, t)));
  s.sqrt_bias_correction2 = static_cast<float>(sqrt(1.0 - power(h.beta2, t)));
  s.grad_sign = h.maximize ? 0x80000000u : 0u;
  s.l2 = s.weight_decay != 0.0f;
  s.lerp_from_grad = s.one_minus_beta1 >= 0.5f;
  return s;
}

// f32(1 / scale), the factor of the first pass; a scale of 0 gives Inf, and so a skip.
HALFSTEP_FN float inverse(float scale) { return static_cast<float>(1.0 / static_cast<double>(scale)); }

// min(1, max_norm / (norm + 1e-6)), torch.nn.utils.clip_grad_norm_'s coefficient; a NaN norm stays NaN.
HALFSTEP_FN double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient >= 1.0 ? 1.0 : coefficient;
}

// What the whole step knows before the update: the first pass's result, the scaler's scale, the clip.
struct StepInputs {
  double sum_squares = 0.0;  // of the unscaled gradients, in the contract's order
  float scale = 1.0f;        // loss scale, 1 = none
  double max_norm = -1.0;    // negative = no clipping
  bool nonfinite = false;    // some unscaled gradient is not finite
  bool skip_nonfinite = false;
  bool found_inf = false;  // somebody else (a scaler, another rank) asks for a skip
};

struct StepDecision {
  double norm;
  float grad_factor;  // clip coefficient / loss scale, float64 rounded once
  bool skip;
};

HALFSTEP_FN StepDecision decide(const StepInputs& in) {
  StepDecision d;
  d.norm = sqrt(in.sum_squares);
  const double coefficient = in.max_norm < 0.0 ? 1.0 : clip_coefficient(d.norm, in.max_norm);
  d.grad_factor = static_cast<float>(coefficient / static_cast<double>(in.scale));
  d.skip = in.found_inf || (in.skip_nonfinite && in.nonfinite);
  return d;
}

HALFSTEP_FN float square_root(float x) { return sqrtf(x); }

// One element, or a vector of them (cpu/simd.h). `g` is already unscaled and clipped; p, m, v and max_v (null: no amsgrad)
// are read and written.
template <class Real>
HALFSTEP_FN void adam_update(Real g, Real& p, Real& m, Real& v, Real* max_v, const AdamScalars& s) {
  g = float_of(bits_of(g) ^ s.grad_sign);
  if (s.l2) g = g + s.weight_decay * p;
  p = p * s.decay;
  if (s.lerp_from_grad)
    m = g - (g - m) * s.beta1;
  else
    m = m + s.one_minus_beta1 * (g - m);
  v = s.beta2 * v + (s.one_minus_beta2 * g) * g;
  Real second = v;
  if (max_v) {
    *max_v = select((*max_v > v) | (*max_v != *max_v), *max_v, v);  // NaN propagates, as in torch.maximum
    second = *max_v;
  }
  const Real denominator = square_root(second) / s.sqrt_bias_correction2 + s.eps;
  p = p - (s.step_size * m) / denominator;
}

}  // namespace halfstep
