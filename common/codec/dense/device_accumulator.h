// Merging of dense frames in the memory of a device: chunks are added as they come, and their values checked on the
// way. Nobody waits for either before a frame is complete.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/dense/dense_shape.h"

namespace gradwire::dense {

DeviceNeeds NeedsOnDevice(const DenseShape& shape);

// As Codec::NewDeviceAccumulator.
absl::StatusOr<std::unique_ptr<Accumulator>> MakeDeviceAccumulator(const DenseShape& shape,
                                                                   kernels::cuda::DeviceBucket* bucket);

}  // namespace gradwire::dense
