// Where the arrays of a job lie: it makes the accumulators and parameters of its buckets, in host memory or on a
// device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_bucket.h"
#include "server/job/parameter_store.h"

namespace gradwire {

// Outlives what it makes. Makes the store of each bucket once.
class JobArrays {
 public:
  virtual ~JobArrays() = default;
  // `codec`: that of the bucket. Errors: those of Codec::NewDeviceAccumulator.
  virtual absl::StatusOr<std::unique_ptr<Accumulator>> NewAccumulator(uint32_t bucket, const Codec& codec) = 0;
  // Errors: ResourceExhausted.
  virtual absl::StatusOr<std::unique_ptr<ParameterStore>> NewStore(uint32_t bucket) = 0;
};

// Everything that is given outlives the arrays.
std::unique_ptr<JobArrays> MakeHostArrays(const Job* job, const Layout* layout, uint32_t shard,
                                          kernels::Backend* backend);

// `backend`: over host memory. Takes `device_bytes` (MemoryBound::device) from the device's budget for as long as the
// arrays live. Errors: ResourceExhausted, with the figures, where so much is not left.
absl::StatusOr<std::unique_ptr<JobArrays>> MakeDeviceArrays(const Job* job, const Layout* layout, uint32_t shard,
                                                            const std::vector<std::unique_ptr<Codec>>& codecs,
                                                            kernels::Backend* backend,
                                                            kernels::cuda::DeviceShare* share, uint64_t device_bytes);
// The part of device_bytes that bucket `layout` takes; `codec` may be null: then what every codec takes.
uint64_t DeviceBytes(const Job& job, const BucketLayout& layout, const Codec* codec);

}  // namespace gradwire
