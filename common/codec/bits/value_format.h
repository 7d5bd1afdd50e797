// How the values of sparse codecs travel: float32 or less. Spec: proto/WIRE.md, "Value formats".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/job/codec_spec.h"

namespace gradwire {

using ValueFormat = SparseSpec::Values;

// Of a payload with n values. int8, int6 and int4 have a float32 scale in front, 2bit two magnitudes, unless n is 0.
size_t BytesOf(ValueFormat format, size_t n);

// Writes BytesOf(format, n) bytes. Nearest values, ties to even; magnitudes that a format cannot hold become its
// largest (2bit: the nearer of two). Precondition: all finite.
void WriteValues(ValueFormat format, const float* values, size_t n, uint8_t* out);

// The same values with their integers coded (integer_code.h) behind scale and bits; nothing where the format has none,
// there are no values, or this takes no fewer bytes than WriteValues.
std::vector<uint8_t> CodeValues(ValueFormat format, const float* values, size_t n);

// The values that `payload` stands for. Errors: InvalidArgument (size; a scale that is not finite and positive or zero;
// padding that is not zero). Values may still be infinite or NaN where the format has them.
absl::Status ReadValues(ValueFormat format, std::span<const uint8_t> payload, size_t n, float* values);
// Those of CodeValues. Errors: as ReadValues; a format without integers, integers that it does not have.
absl::Status ReadCodedValues(ValueFormat format, std::span<const uint8_t> payload, size_t n, float* values);

}  // namespace gradwire
