// The runs of a bucket as kernels on a device see them.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "common/job/layout.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire {

// Not thread-safe. Everything is launched on the bucket's stream.
class DeviceRuns {
 public:
  // Both outlive this.
  DeviceRuns(const BucketLayout* layout, kernels::cuda::DeviceBucket* bucket) : layout_(*layout), bucket_(*bucket) {}

  // Takes Bytes(layout) of the job's device memory. Errors: ResourceExhausted.
  absl::Status Allocate();
  static uint64_t Bytes(const BucketLayout& layout);

  // One per run; kUncalibrated gives the unit 0.
  void SetExponents(std::span<const int8_t> exponents);
  kernels::cuda::RunScales scales() const { return {begin_, units_, static_cast<uint32_t>(layout_.runs.size())}; }

 private:
  const BucketLayout& layout_;
  kernels::cuda::DeviceBucket& bucket_;
  // In device memory.
  uint64_t* begin_ = nullptr;
  float* units_ = nullptr;
};

}  // namespace gradwire
