// One element of the optimizers that step by layer (LAMB, LANS) and of Lion. What is computed once per tensor, from
// the norms of the whole of it, comes with the coefficients.
#pragma once

#include <cmath>

#include "kernels/math/optimizer.h"

namespace gradwire::kernels {

// LAMB (You et al., arXiv 1904.00962, algorithm 2): u = m/(sqrt v + eps) + weight_decay x, x -= lr (|x|/|u|) u, the
// moments with bias correction. LANS (Zheng et al., arXiv 2006.13484, algorithm 2): the gradient is divided by its norm
// first, and the step is a mixture of the directions of the first moment (R) and of the gradient itself (Q).
struct LayerCoefficients {
  float beta1 = 0, one_minus_beta1 = 1;
  float beta2 = 0, one_minus_beta2 = 1;
  float correction = 1;    // 1 / (1 - beta1^t)
  float inverse_root = 1;  // 1 / sqrt(1 - beta2^t)
  float epsilon = 0;
  float weight_decay = 0;
  // Of the tensor.
  float gradient_scale = 1;  // LANS: 1 / (|g| + eps)
  float direction_rate = 0;  // LAMB: lr |x|/|u|. LANS: lr beta1 |x|/|R|
  float gradient_rate = 0;   // LANS: lr (1 - beta1) |x|/|Q|
};

// Without what belongs to a tensor.
GW_HD LayerCoefficients MakeLayer(float weight_decay, float beta1, float beta2, float epsilon, uint64_t t) {
  LayerCoefficients c;
  c.beta1 = beta1;
  c.one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(beta1));
  c.beta2 = beta2;
  c.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(beta2));
  c.correction = static_cast<float>(1.0 / (1.0 - IntegerPower(beta1, t)));
  c.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - IntegerPower(beta2, t)));
  c.epsilon = epsilon;
  c.weight_decay = weight_decay;
  return c;
}

// |x|/|u| of the squares; 1 where one of them is 0, or not finite.
GW_HD double TrustRatio(double parameter_square, double direction_square) {
  const double ratio = std::sqrt(parameter_square) / std::sqrt(direction_square);
  return ratio > 0 && ratio <= 1.7976931348623157e308 ? ratio : 1.0;
}

// Where the parameter would go with the norms still to come: LAMB's u, LANS's R and Q.
struct LayerDirections {
  float first = 0;  // the moments behind the step
  float second = 0;
  float of_moment = 0;    // u, R
  float of_gradient = 0;  // Q
};

// `g`: LANS's is scaled already.
GW_HD LayerDirections DirectionsOf(float p, float g, float m, float v, const LayerCoefficients& c) {
  LayerDirections d;
  d.first = c.beta1 * m + c.one_minus_beta1 * g;
  d.second = c.beta2 * v + c.one_minus_beta2 * (g * g);
  const float denominator = std::sqrt(d.second) * c.inverse_root + c.epsilon;
  const float decay = c.weight_decay * p;
  d.of_moment = d.first * c.correction / denominator + decay;
  d.of_gradient = g / denominator + decay;
  return d;
}

GW_HD float LambStep(float p, float g, float* m, float* v, const LayerCoefficients& c) {
  const LayerDirections d = DirectionsOf(p, g, *m, *v, c);
  *m = d.first;
  *v = d.second;
  return p - c.direction_rate * d.of_moment;
}

GW_HD float LansStep(float p, float g, float* m, float* v, const LayerCoefficients& c) {
  const LayerDirections d = DirectionsOf(p, g * c.gradient_scale, *m, *v, c);
  *m = d.first;
  *v = d.second;
  return p - (c.direction_rate * d.of_moment + c.gradient_rate * d.of_gradient);
}

// Lion (Chen et al., arXiv 2302.06675, algorithm 2), decoupled weight decay.
struct LionCoefficients {
  float learning_rate = 0;
  float decay = 1;  // 1 - lr * weight_decay
  float beta1 = 0, one_minus_beta1 = 1;
  float beta2 = 0, one_minus_beta2 = 1;
};

GW_HD LionCoefficients MakeLion(float learning_rate, float weight_decay, float beta1, float beta2) {
  LionCoefficients c;
  c.learning_rate = learning_rate;
  c.decay = static_cast<float>(1.0 - static_cast<double>(learning_rate) * static_cast<double>(weight_decay));
  c.beta1 = beta1;
  c.one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(beta1));
  c.beta2 = beta2;
  c.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(beta2));
  return c;
}

GW_HD float LionStep(float p, float g, float* m, const LionCoefficients& c) {
  const float direction = c.beta1 * *m + c.one_minus_beta1 * g;
  const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f;
  *m = c.beta2 * *m + c.one_minus_beta2 * g;
  return p * c.decay - c.learning_rate * sign;
}

}  // namespace gradwire::kernels
