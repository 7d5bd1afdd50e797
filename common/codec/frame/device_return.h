// Codec::Return where the residual lies in the memory of a device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire {

// For frames of codecs that have a device encoder; `residual`: one pointer to device memory per run of the layout.
// Launched on the bucket's stream; the frame may go on return. Errors: those of Codec::Return; ResourceExhausted.
absl::Status ReturnOnDevice(const BucketLayout& layout, const EncodedFrame& frame,
                            const std::vector<uint32_t>* positions, std::span<float* const> residual,
                            kernels::cuda::DeviceBucket* bucket);

}  // namespace gradwire
