// Per-tensor work of a worker before its buckets are encoded: precondition, add to the residual, choose what is sent.
#pragma once

#include <cstdint>
#include <span>

#include "common/codec/codec.h"
#include "kernels/backend.h"

namespace gradwire {

// Index of the first non-finite element, or -1.
int64_t FindNonFinite(std::span<const float> values, kernels::Backend& backend);

// pending += gradient, element by element.
void AddToPending(std::span<const float> gradient, std::span<float> pending, kernels::Backend& backend);

// pending += gradient / (sqrt(v / (1 - beta2^t)) + epsilon), v = beta2 v + (1 - beta2) gradient^2; t counts from 1.
// The residual is the momentum.
void AddStepToPending(std::span<const float> gradient, std::span<float> second_moment, std::span<float> pending,
                      float beta2, float epsilon, uint64_t t, kernels::Backend& backend);

// The gradient, scaled to `rule.largest_norm` where its norm is larger (sums of squares in float64, in a fixed order),
// goes into the velocity u and that into what is pending: u = m u + g; pending += u, or m u + g for Nesterov's (Lin et
// al. 2017, section 3.2 and appendix B).
void AddVelocityToPending(std::span<const float> gradient, const VelocityRule& rule, std::span<float> velocity,
                          std::span<float> pending);

// Chooses the elements of largest magnitude: about density * pending.size() of them, within 5 % relative however
// many are tied; kExact: within that of ties alone. All zero or density 0: selects nothing. Deterministic.
Selection SelectThreshold(std::span<const float> pending, double density, kernels::Accuracy accuracy,
                          kernels::Backend& backend);
// What `codec` asks for in `round`; of no meaning where it selects nothing.
Selection SelectThreshold(const Codec& codec, uint64_t round, std::span<const float> pending,
                          kernels::Backend& backend);

}  // namespace gradwire
