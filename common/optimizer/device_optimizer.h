// The optimizer step where parameters lie in the memory of a device: on shards in arrays of their own, on workers in
// the tensors of the training framework.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/frame/device_runs.h"
#include "common/codec/update/update.h"
#include "common/optimizer/optimizer.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire {

// Of one slice. Not thread-safe. Everything is launched on the bucket's stream, and overwrites DeviceBucket::means,
// which must be as many floats as the slice has elements unless every update of the job can be applied to the sent
// elements alone (HasSparseSteps, and no update codec).
class DeviceOptimizer {
 public:
  // All outlive this.
  DeviceOptimizer(const Job* job, const BucketLayout* layout, kernels::cuda::DeviceBucket* bucket);

  // Takes Bytes(layout) of the job's device memory. `runs`: where the slice lies there. Errors: ResourceExhausted.
  absl::Status Prepare(std::vector<RunState> runs);
  static uint64_t Bytes(const BucketLayout& layout);

  // ApplyUpdate, to the bit. Precondition: the job goes with Feature::kReplicasOnGpu or kServersOnGpu. Returns when
  // everything is launched. Errors: those of ApplyUpdate; ResourceExhausted.
  absl::Status Apply(const Update& update);
  // The means of all elements in position order, as Update::MeanOfRun gives them; in device memory, until the next
  // call. Precondition: the update has contributors and a body.
  absl::StatusOr<const float*> MeansOf(const Update& update);

 private:
  // Positions and integers of a sparse update, in device memory.
  struct Sparse {
    kernels::cuda::RoundMemory memory;
    size_t count;
    const uint32_t* positions() const { return reinterpret_cast<const uint32_t*>(memory.data()); }
    const int32_t* integers() const { return reinterpret_cast<const int32_t*>(positions() + count); }
  };
  absl::StatusOr<Sparse> UploadSparse(const Update& update);
  uint32_t GroupOf(size_t run) const;
  // The run lies behind the one before it, and is of the same parameter group.
  bool Follows(size_t run) const;

  const Job& job_;
  const BucketLayout& layout_;
  kernels::cuda::DeviceBucket& bucket_;
  DeviceRuns scales_;
  std::vector<RunState> runs_;
  // In device memory, per run.
  float** parameters_ = nullptr;
  float* rates_ = nullptr;  // learning rates of the update that is being applied
};

}  // namespace gradwire
