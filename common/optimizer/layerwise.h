// What comes of the norms of whole tensors: the squares that a shard contributes to them, and the coefficients of a
// tensor's step. The same squares give the same bits wherever an update is applied.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/optimizer/steps.h"

namespace gradwire {

// The squares of `phase` (NormPhases) over each run of the slice, before `update` is applied: [norm of the phase][run].
// Those of earlier phases are in update.norms. All 0 where the update is not applied. Errors as of ApplyUpdate.
absl::StatusOr<std::vector<double>> SquaresOfPhase(const Job& job, const BucketLayout& layout, const Update& update,
                                                   std::span<const RunState> runs, size_t phase);

// By what the mean is multiplied before anything else: 1 where the job does not clip. As torch's clip_grad_norm_.
double ClipScale(const Job& job, const Update& update);

// The coefficients of one tensor, the `tensor`-th of its slice, completed as far as update.norms has what they depend
// on.
kernels::LayerCoefficients LayerOf(const Job& job, const Update& update, const GroupStep& step, size_t tensor);

}  // namespace gradwire
