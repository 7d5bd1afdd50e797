// The cells of one bucket, summed over the frames of a round: in host memory or in that of a device.
#pragma once

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

// Not thread-safe.
class SketchSums {
 public:
  virtual ~SketchSums() = default;
  // All cells of this geometry become 0. Precondition: no more of them than shape.limits.max_cells.
  virtual void Open(const kernels::SketchArgs& sketch) = 0;
  // Adds or subtracts the cells of a segment that lies within the geometry; its bytes may be reused on return.
  virtual void Merge(const wire::Segment& cells, kernels::Sign sign) = 0;
  // Backend::SketchPeel of `positions`; `integers` and `resolved` are as many. Errors: ResourceExhausted.
  virtual absl::Status Peel(std::span<const uint32_t> positions, int32_t* integers, uint8_t* resolved) = 0;
  virtual size_t memory_bytes() const = 0;  // in host memory
};

std::unique_ptr<SketchSums> MakeHostSums(const TagcShape& shape);

DeviceNeeds NeedsOnDevice(const TagcShape& shape);
// As Codec::NewDeviceAccumulator.
absl::StatusOr<std::unique_ptr<SketchSums>> MakeDeviceSums(const TagcShape& shape, kernels::cuda::DeviceBucket* bucket);

}  // namespace gradwire::tagc
