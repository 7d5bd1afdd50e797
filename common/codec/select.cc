// Per-tensor work of a worker: see select.h.
#include "common/codec/select.h"

namespace gradwire {

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

Selection SelectThreshold(std::span<const float> pending, double density, kernels::Backend& backend) {
  const kernels::Threshold threshold =
      backend.FindThreshold(pending.data(), pending.size(), density * static_cast<double>(pending.size()), nullptr);
  return {.key = threshold.key, .keep_below = threshold.keep_below};
}

}  // namespace gradwire
