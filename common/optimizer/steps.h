// What applying an update consists of, wherever its values and the parameters lie: shared by the optimizer on the host
// (optimizer.h) and the parameters on a device.
#pragma once

#include <cstddef>
#include <vector>

#include "common/optimizer/optimizer.h"
#include "kernels/math/layerwise.h"

namespace gradwire {

// Coefficients of one parameter group, derived once per update.
struct GroupStep {
  float learning_rate = 0;
  float weight_decay = 0;
  kernels::SgdCoefficients sgd;
  kernels::AdamWCoefficients adamw;
  kernels::LionCoefficients lion;
  kernels::LayerCoefficients layer;  // without what belongs to a tensor
};

// False where ApplyUpdate does nothing.
bool Applies(const Job& job, const Update& update);
// Errors: InvalidArgument for an update that does not fit job and layout, or memory for another number of runs.
absl::Status CheckUpdate(const Job& job, const BucketLayout& layout, const Update& update, size_t runs);
std::vector<GroupStep> DeriveSteps(const Job& job, const Update& update);
// Whether a sparse update changes only the elements that were sent: plain steps without decay.
bool HasSparseSteps(const v1::OptimizerSpec& optimizer);
// One step of n elements of one group; step.layer is that of their tensor. Pointers are in the memory of the backend;
// in the host's for LAMB, LANS and Lion.
void ApplyStep(v1::OptimizerKind kind, const GroupStep& step, const RunState& elements, const float* mean, size_t n,
               kernels::Backend& backend, kernels::Stream* stream);

}  // namespace gradwire
