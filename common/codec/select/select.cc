// Per-tensor work of a worker: see select.h.
#include "common/codec/select/select.h"

#include <cmath>
#include <optional>

#include "common/codec/bits/reductions.h"
#include "kernels/cpu/reference/clones.h"

namespace gradwire {
namespace {

GW_CLONES void AddMomentum(const float* g, size_t n, float scale, float momentum, float* u, float* v) {
  for (size_t i = 0; i < n; ++i) {
    u[i] = momentum * u[i] + scale * g[i];
    v[i] += u[i];
  }
}

GW_CLONES void AddNesterov(const float* g, size_t n, float scale, float momentum, float* u, float* v) {
  for (size_t i = 0; i < n; ++i) {
    const float x = scale * g[i];
    u[i] = momentum * u[i] + x;
    v[i] += momentum * u[i] + x;
  }
}

}  // namespace

int64_t FindNonFinite(std::span<const float> values, kernels::Backend& backend) {
  return backend.FindNonFinite(values.data(), values.size(), nullptr);
}

void AddToPending(std::span<const float> gradient, std::span<float> pending, kernels::Backend& backend) {
  backend.Add(pending.data(), gradient.data(), pending.size(), nullptr);
}

void AddStepToPending(std::span<const float> gradient, std::span<float> second_moment, std::span<float> pending,
                      float beta2, float epsilon, uint64_t t, kernels::Backend& backend) {
  backend.AddPreconditioned(pending.data(), gradient.data(), second_moment.data(), pending.size(),
                            kernels::MakePrecondition(beta2, epsilon, t), nullptr);
}

void AddVelocityToPending(std::span<const float> gradient, const VelocityRule& rule, std::span<float> velocity,
                          std::span<float> pending) {
  float scale = 1;
  if (rule.largest_norm > 0) {
    const double norm = std::sqrt(SumOfSquares(gradient.data(), gradient.size()));
    if (norm > static_cast<double>(rule.largest_norm)) {
      scale = static_cast<float>(static_cast<double>(rule.largest_norm) / norm);
    }
  }
  const auto add = rule.nesterov ? AddNesterov : AddMomentum;
  add(gradient.data(), gradient.size(), scale, rule.momentum, velocity.data(), pending.data());
}

Selection SelectThreshold(std::span<const float> pending, double density, kernels::Accuracy accuracy,
                          kernels::Backend& backend) {
  const double wanted = density * static_cast<double>(pending.size());
  const kernels::Threshold threshold = backend.FindThreshold(pending.data(), pending.size(), wanted, accuracy, nullptr);
  return {.key = threshold.key, .keep_below = threshold.keep_below};
}

Selection SelectThreshold(const Codec& codec, uint64_t round, std::span<const float> pending,
                          kernels::Backend& backend) {
  const std::optional<kernels::Accuracy> accuracy = codec.selects();
  return accuracy ? SelectThreshold(pending, codec.Density(round), *accuracy, backend) : Selection();
}

}  // namespace gradwire
