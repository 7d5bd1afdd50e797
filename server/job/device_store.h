// The parameters and optimizer state of one bucket in the memory of a device.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_bucket.h"
#include "server/job/parameter_store.h"

namespace gradwire {

// All pointers outlive the store, which works on the bucket's stream and overwrites its means. `backend`, over host
// memory, compresses updates. Errors: ResourceExhausted where the job's device memory does not suffice; those of
// UpdateCompressor::Make.
absl::StatusOr<std::unique_ptr<ParameterStore>> MakeDeviceStore(const Job* job, const BucketLayout* layout,
                                                                kernels::Backend* backend,
                                                                kernels::cuda::DeviceBucket* bucket);
// What such a store takes of the job's device memory.
uint64_t DeviceStoreBytes(const Job& job, const BucketLayout& layout);
// Whether such a store needs DeviceBucket::means: unless all updates are sums that are applied to the sent elements
// alone.
bool NeedsMeans(const Job& job, const BucketLayout& layout);

}  // namespace gradwire
