// See value_format.h.
#include "common/codec/bits/value_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_format.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/grid.h"
#include "kernels/math/half.h"

namespace gradwire {
namespace {

// Largest integer of int8 and int4: symmetric.
constexpr int kLargest8 = 127;
constexpr int kLargest4 = 7;

float LargestMagnitude(const float* values, size_t n) {
  float largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

int ToInteger(float x, float inverse, int largest) {
  const float scaled = std::clamp(x * inverse, -static_cast<float>(largest), static_cast<float>(largest));
  return static_cast<int>(kernels::RoundToEven(scaled));
}

// Returns 1 / scale; 0 where all values are.
float WriteScale(const float* values, size_t n, int largest, uint8_t* out) {
  const float scale = LargestMagnitude(values, n) / static_cast<float>(largest);
  std::memcpy(out, &scale, sizeof(scale));
  // A scale so small that its inverse is infinite: everything becomes 0.
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

absl::Status ReadScale(std::span<const uint8_t> payload, float* scale) {
  std::memcpy(scale, payload.data(), sizeof(*scale));
  if (std::isfinite(*scale) && !std::signbit(*scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("values: scale %g is not a finite, non-negative number", *scale));
}

GW_CLONES void WriteHalves(const float* values, size_t n, uint8_t* out) {
  for (size_t i = 0; i < n; ++i) {
    const uint16_t bits = kernels::FloatToHalf(values[i]);
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

GW_CLONES void ReadHalves(const uint8_t* in, size_t n, float* values) {
  for (size_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, in + 2 * i, 2);
    values[i] = kernels::HalfToFloat(bits);
  }
}

}  // namespace

size_t BytesOf(ValueFormat format, size_t n) {
  switch (format) {
    case ValueFormat::kFp32:
      return 4 * n;
    case ValueFormat::kFp16:
    case ValueFormat::kBf16:
      return 2 * n;
    case ValueFormat::kInt8:
      return n == 0 ? 0 : 4 + n;
    case ValueFormat::kInt4:
      return n == 0 ? 0 : 4 + (n + 1) / 2;
  }
  return 0;
}

void WriteValues(ValueFormat format, const float* values, size_t n, uint8_t* out) {
  if (n == 0) return;
  switch (format) {
    case ValueFormat::kFp32:
      std::memcpy(out, values, 4 * n);
      return;
    case ValueFormat::kFp16:
      return WriteHalves(values, n, out);
    case ValueFormat::kBf16:
      for (size_t i = 0; i < n; ++i) {
        float rest;
        const uint16_t bits = kernels::SplitBf16(values[i], &rest);
        std::memcpy(out + 2 * i, &bits, 2);
      }
      return;
    case ValueFormat::kInt8: {
      const float inverse = WriteScale(values, n, kLargest8, out);
      for (size_t i = 0; i < n; ++i) out[4 + i] = static_cast<uint8_t>(ToInteger(values[i], inverse, kLargest8));
      return;
    }
    case ValueFormat::kInt4: {
      const float inverse = WriteScale(values, n, kLargest4, out);
      std::memset(out + 4, 0, (n + 1) / 2);
      for (size_t i = 0; i < n; ++i) {
        const int nibble = ToInteger(values[i], inverse, kLargest4) & 15;
        out[4 + i / 2] = static_cast<uint8_t>(out[4 + i / 2] | nibble << (i % 2 * 4));
      }
      return;
    }
  }
}

absl::Status ReadValues(ValueFormat format, std::span<const uint8_t> payload, size_t n, float* values) {
  if (payload.size() != BytesOf(format, n)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d values take %d bytes, found %d", n, BytesOf(format, n), payload.size()));
  }
  if (n == 0) return absl::OkStatus();
  float scale = 0;
  switch (format) {
    case ValueFormat::kFp32:
      std::memcpy(values, payload.data(), 4 * n);
      break;
    case ValueFormat::kFp16:
      ReadHalves(payload.data(), n, values);
      break;
    case ValueFormat::kBf16:
      for (size_t i = 0; i < n; ++i) {
        uint16_t bits;
        std::memcpy(&bits, payload.data() + 2 * i, 2);
        values[i] = kernels::Bf16ToFloat(bits);
      }
      break;
    case ValueFormat::kInt8:
      if (absl::Status status = ReadScale(payload, &scale); !status.ok()) return status;
      for (size_t i = 0; i < n; ++i) values[i] = scale * static_cast<float>(static_cast<int8_t>(payload[4 + i]));
      break;
    case ValueFormat::kInt4:
      if (absl::Status status = ReadScale(payload, &scale); !status.ok()) return status;
      if (n % 2 == 1 && payload.back() >> 4 != 0) return absl::InvalidArgumentError("int4 values: padding is not 0");
      for (size_t i = 0; i < n; ++i) {
        const int nibble = payload[4 + i / 2] >> (i % 2 * 4) & 15;
        values[i] = scale * static_cast<float>(nibble < 8 ? nibble : nibble - 16);
      }
      break;
  }
  return absl::OkStatus();
}

}  // namespace gradwire
