// Two-way compression of one bucket: the residual of what its shard sends back lies in host memory, wherever the
// parameters do.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/large_array.h"
#include "common/codec/update/update_compressor.h"

namespace gradwire {

// Does nothing where the bucket has no update codec. Not thread-safe.
class UpdateCompression {
 public:
  // All pointers outlive it. Errors: those of UpdateCompressor::Make.
  static absl::StatusOr<UpdateCompression> Make(const Job* job, const BucketLayout* layout, kernels::Backend* backend);

  // As ParameterStore's.
  absl::Status Compress(const RoundPlan& plan, UpdateFrame* update);
  absl::Status Replay(const RoundPlan& plan, const UpdateFrame& update);
  // The update is applied: the residual moves on.
  void Settle();

  // Of layout.elements; null where the update codec keeps none.
  const float* residual() const { return residual_.empty() ? nullptr : residual_.data(); }
  void LoadResidual(const float* from);

 private:
  UpdateCompression(const CodecContext& context, std::unique_ptr<UpdateCompressor> compressor);

  CodecContext context_;
  std::unique_ptr<UpdateCompressor> compressor_;  // may be null
  LargeArray<float> residual_;
  ResidualChange change_;  // from Compress until Settle
};

}  // namespace gradwire
