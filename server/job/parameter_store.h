// The parameters and optimizer state of one bucket, wherever they lie: what rounds, pulls and digests go through.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/frame/parameters.h"
#include "kernels/backend.h"

namespace gradwire {

// Not thread-safe: the bucket's mutex serialises calls. Where the job keeps no parameters (OPTIMIZER_NONE) there are no
// arrays, and updates pass without effect.
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;

  // Takes the parameters from the chunks of a worker's upload; moments become 0. Errors: those of DecodeParameters.
  virtual absl::Status Initialize(std::span<const Bytes> chunks) = 0;
  // Where the bucket has an update codec: makes the update frame of a round that was encoded by `plan` from its mean
  // (UpdateCompressor). The residual moves on with Apply, which comes next. Errors: those of UpdateCompressor.
  virtual absl::Status Compress(const RoundPlan& plan, UpdateFrame* update) = 0;
  // In replay, where the record has what Compress made: does the same to the residual. Errors: those of ReplayResidual.
  virtual absl::Status ReplayCompression(const RoundPlan& plan, const UpdateFrame& update) = 0;
  // Decodes and applies the update frame of a round that was encoded by `plan`. Errors: those of DecodeUpdate and
  // ApplyUpdate.
  virtual absl::Status Apply(const UpdateFrame& update, const RoundPlan& plan) = 0;
  // Called before Apply: what this bucket has of the norms of `phase`, as SquaresOfPhase. Unimplemented on a device.
  virtual absl::StatusOr<std::vector<double>> Squares(const Update& update, size_t phase) = 0;
  // The parameters frame for pullers, of the version that `plans` ends with. Its chunks may come in pieces, and want to
  // be completed, but not those of kShard. Calls that change parameters leave it as it is. Throws std::bad_alloc.
  virtual wire::FrameToSend Serialize(const PlanWindow& plans, ParameterContent content) = 0;
  // Copies the arrays that have a target; arrays that the job does not keep leave theirs alone.
  virtual void Read(const ParameterTargets& targets) = 0;
  // Replaces the arrays that are given.
  virtual void Load(const ParameterArrays& arrays) = 0;
};

// In host memory. All pointers outlive the store. Errors: those of UpdateCompressor::Make.
absl::StatusOr<std::unique_ptr<ParameterStore>> MakeHostStore(const Job* job, const BucketLayout* layout,
                                                              kernels::Backend* backend);

}  // namespace gradwire
