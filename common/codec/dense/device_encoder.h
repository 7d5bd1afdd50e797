// The encoder of gradients that lie in the memory of a device: nothing but frames comes to the host.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/dense/dense_shape.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire::dense {

// As Codec::NewDeviceEncoder.
std::unique_ptr<Encoder> MakeDeviceEncoder(const DenseShape& shape, kernels::cuda::DeviceBucket* bucket);

}  // namespace gradwire::dense
