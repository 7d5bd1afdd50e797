// The runs of a bucket where kernels that encode find them.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/job/layout.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire {

// The unit of an exponent, 0 for kUncalibrated.
float UnitOf(int8_t exponent);

// A table in device memory, for as long as this lives.
class DevicePlaces {
 public:
  // `fill` sets all of a run's place but its length and position. Errors: ResourceExhausted.
  static absl::StatusOr<DevicePlaces> Make(const BucketLayout& layout, kernels::cuda::DeviceBucket* bucket,
                                           absl::FunctionRef<void(size_t run, kernels::cuda::RunPlace* place)> fill);

  const kernels::cuda::RunPlaces& runs() const { return runs_; }

 private:
  DevicePlaces(kernels::cuda::RoundMemory memory, const kernels::cuda::RunPlaces& runs)
      : memory_(std::move(memory)), runs_(runs) {}

  kernels::cuda::RoundMemory memory_;
  kernels::cuda::RunPlaces runs_;
};

}  // namespace gradwire
