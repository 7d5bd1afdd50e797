// Sums of dense frames in host memory; the counterpart on a device is device_accumulator.h.
#pragma once

#include <memory>

#include "common/codec/codec.h"
#include "common/codec/dense/dense_shape.h"

namespace gradwire::dense {

std::unique_ptr<Accumulator> MakeAccumulator(const DenseShape& shape);
// An upper bound of its Accumulator::memory_bytes.
size_t AccumulatorBytes(const DenseShape& shape);

}  // namespace gradwire::dense
