// One element of each optimizer step. Every replica runs exactly these operations in this order, so parameters stay
// bit-identical.
#pragma once

#include <cmath>

#include "kernels/math/math.h"

namespace gradwire::kernels {

// torch.optim.SGD: dampening 0, coupled weight decay. With momentum 0 the buffer is not touched.
struct SgdCoefficients {
  float learning_rate = 0;
  float weight_decay = 0;
  float momentum = 0;
  bool nesterov = false;
};

// torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101). Derived once per step by MakeAdamW.
struct AdamWCoefficients {
  float decay = 1;         // 1 - lr * weight_decay
  float step = 0;          // lr / (1 - beta1^t)
  float inverse_root = 1;  // 1 / sqrt(1 - beta2^t); a product instead of torch's quotient, within one ulp of it
  float beta1 = 0, one_minus_beta1 = 1;
  float beta2 = 0, one_minus_beta2 = 1;
  float epsilon = 0;
};

// base^n by repeated squaring: libm's pow differs between platforms.
GW_HD double IntegerPower(double base, uint64_t n) {
  double result = 1;
  for (; n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

GW_HD AdamWCoefficients MakeAdamW(float learning_rate, float weight_decay, float beta1, float beta2, float epsilon,
                                  uint64_t t) {
  AdamWCoefficients c;
  const double lr = learning_rate;
  c.decay = static_cast<float>(1.0 - lr * static_cast<double>(weight_decay));
  c.step = static_cast<float>(lr / (1.0 - IntegerPower(beta1, t)));
  c.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - IntegerPower(beta2, t)));
  c.beta1 = beta1;
  c.one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(beta1));
  c.beta2 = beta2;
  c.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(beta2));
  c.epsilon = epsilon;
  return c;
}

GW_HD float SgdStep(float p, float g, const SgdCoefficients& c) {
  return p - c.learning_rate * (g + c.weight_decay * p);
}

GW_HD float SgdMomentumStep(float p, float g, float* buffer, const SgdCoefficients& c) {
  const float decayed = g + c.weight_decay * p;
  const float b = c.momentum * *buffer + decayed;
  *buffer = b;
  const float direction = c.nesterov ? decayed + c.momentum * b : b;
  return p - c.learning_rate * direction;
}

GW_HD float AdamWStep(float p, float g, float* m, float* v, const AdamWCoefficients& c) {
  const float first = c.beta1 * *m + c.one_minus_beta1 * g;
  const float second = c.beta2 * *v + c.one_minus_beta2 * (g * g);
  *m = first;
  *v = second;
  const float denominator = std::sqrt(second) * c.inverse_root + c.epsilon;
  return p * c.decay - c.step * (first / denominator);
}

// For pushed steps and deltas: p -= lr * mean, with decoupled weight decay p -= lr * (mean + weight_decay * p).
GW_HD float PlainStep(float p, float mean, float learning_rate) { return p - learning_rate * mean; }
GW_HD float DecayedPlainStep(float p, float mean, float learning_rate, float weight_decay) {
  return p - learning_rate * (mean + weight_decay * p);
}

// The worker-side preconditioner of pushed steps: gradient over the root of its own second
// moment, without a first moment, because the residual is the momentum.
struct PreconditionCoefficients {
  float beta2 = 0, one_minus_beta2 = 1;
  float inverse_root = 1;  // 1 / sqrt(1 - beta2^t)
  float epsilon = 0;
};

GW_HD PreconditionCoefficients MakePrecondition(float beta2, float epsilon, uint64_t t) {
  PreconditionCoefficients c;
  c.beta2 = beta2;
  c.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(beta2));
  c.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - IntegerPower(beta2, t)));
  c.epsilon = epsilon;
  return c;
}

GW_HD float Precondition(float g, float* v, const PreconditionCoefficients& c) {
  const float second = c.beta2 * *v + c.one_minus_beta2 * (g * g);
  *v = second;
  return g / (std::sqrt(second) * c.inverse_root + c.epsilon);
}

}  // namespace gradwire::kernels
