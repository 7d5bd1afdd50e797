// See value_format.h.
#include "common/codec/bits/value_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/bit_io.h"
#include "common/codec/bits/integer_code.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/grid.h"
#include "kernels/math/half.h"

namespace gradwire {
namespace {

// Of an integer format; 0 for others.
constexpr uint32_t BitsOf(ValueFormat format) {
  switch (format) {
    case ValueFormat::kInt8:
      return 8;
    case ValueFormat::kInt6:
      return 6;
    case ValueFormat::kInt4:
      return 4;
    default:
      return 0;
  }
}

float LargestMagnitude(const float* values, size_t n) {
  float largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

int ToInteger(float x, float inverse, int largest) {
  const float scaled = std::clamp(x * inverse, -static_cast<float>(largest), static_cast<float>(largest));
  return static_cast<int>(kernels::RoundToEven(scaled));
}

constexpr size_t kCodedHead = sizeof(float) + 1;  // scale, bits that are packed

// Symmetric: of `bits` bits up to this.
constexpr int LargestOf(uint32_t bits) { return (1 << (bits - 1)) - 1; }

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

// What 2bit has for a segment: two magnitudes, the means of those below and above the middle between the two (Lloyd's
// algorithm from the mean of all, a few turns of it).
struct Magnitudes {
  float low = 0;
  float high = 0;
  // Between finite numbers, without a sum that is not.
  float middle() const { return 0.5f * low + 0.5f * high; }
};
constexpr int kLloydTurns = 4;

Magnitudes TwoMagnitudes(const float* values, size_t n) {
  double all = 0;
  for (size_t i = 0; i < n; ++i) all += std::fabs(values[i]);
  const float mean = static_cast<float>(all / static_cast<double>(n));
  Magnitudes found{mean, mean};
  for (int turn = 0; turn < kLloydTurns; ++turn) {
    const float middle = found.middle();
    double above = 0;
    double below = 0;
    size_t many = 0;
    for (size_t i = 0; i < n; ++i) {
      const float magnitude = std::fabs(values[i]);
      const bool high = magnitude > middle;
      above += high ? magnitude : 0;
      below += high ? 0 : magnitude;
      many += high;
    }
    if (many == 0 || many == n) break;
    found = {static_cast<float>(below / static_cast<double>(n - many)),
             static_cast<float>(above / static_cast<double>(many))};
  }
  return found;
}

void WriteTwoBits(const float* values, size_t n, uint8_t* out) {
  const Magnitudes magnitudes = TwoMagnitudes(values, n);
  std::memcpy(out, &magnitudes, sizeof(magnitudes));
  std::memset(out + 8, 0, (n + 3) / 4);
  const float middle = magnitudes.middle();
  for (size_t i = 0; i < n; ++i) {
    const int code = (values[i] < 0 ? 1 : 0) | (std::fabs(values[i]) > middle ? 2 : 0);
    out[8 + i / 4] = static_cast<uint8_t>(out[8 + i / 4] | code << (i % 4 * 2));
  }
}

absl::Status ReadTwoBits(std::span<const uint8_t> payload, size_t n, float* values) {
  Magnitudes magnitudes;
  std::memcpy(&magnitudes, payload.data(), sizeof(magnitudes));
  if (!std::isfinite(magnitudes.high) || std::signbit(magnitudes.low) || !(magnitudes.low <= magnitudes.high)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "2bit values: magnitudes %g, %g are not finite, 0 or more, in order", magnitudes.low, magnitudes.high));
  }
  if (n % 4 != 0 && payload.back() >> (n % 4 * 2) != 0) {
    return absl::InvalidArgumentError("2bit values: padding is not 0");
  }
  const float of_code[] = {magnitudes.low, -magnitudes.low, magnitudes.high, -magnitudes.high};
  for (size_t i = 0; i < n; ++i) values[i] = of_code[payload[8 + i / 4] >> (i % 4 * 2) & 3];
  return absl::OkStatus();
}

void WriteIntegers(uint32_t bits, const float* values, size_t n, uint8_t* out) {
  const int largest = LargestOf(bits);
  const float inverse = WriteScale(values, n, largest, out);
  out += sizeof(float);
  if (bits == 8) {
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(ToInteger(values[i], inverse, largest));
    return;
  }
  const uint32_t mask = (1u << bits) - 1;
  BitWriter to(out);
  for (size_t i = 0; i < n; ++i) {
    to.Put(static_cast<uint32_t>(ToInteger(values[i], inverse, largest)) & mask, static_cast<int>(bits));
  }
  to.Flush();
}

absl::Status ReadIntegers(uint32_t bits, std::span<const uint8_t> payload, size_t n, float* values) {
  float scale = 0;
  GW_RETURN_IF_ERROR(ReadScale(payload, &scale));
  if (bits == 8) {
    const uint8_t* in = payload.data() + sizeof(scale);
    for (size_t i = 0; i < n; ++i) values[i] = scale * static_cast<float>(static_cast<int8_t>(in[i]));
    return absl::OkStatus();
  }
  const int sign = 1 << (bits - 1);
  BitReader from(payload.subspan(sizeof(scale)));
  for (size_t i = 0; i < n; ++i) {
    values[i] = scale * static_cast<float>((static_cast<int>(from.Take(static_cast<int>(bits))) ^ sign) - sign);
  }
  if (from.AtPaddedEnd()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("int%d values: padding is not 0", bits));
}

// As WriteIntegers rounds.
GW_CLONES void ToIntegers(const float* values, size_t n, float inverse, int largest, int32_t* out) {
  for (size_t i = 0; i < n; ++i) out[i] = ToInteger(values[i], inverse, largest);
}
// False if one lies beyond the largest, or below it by more than two's complement has.
GW_CLONES bool OfIntegers(const int32_t* integers, size_t n, float scale, int largest, float* values) {
  uint32_t outside = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t above = static_cast<uint32_t>(integers[i]) + static_cast<uint32_t>(largest) + 1;
    outside |= above > 2 * static_cast<uint32_t>(largest) + 1 ? 1 : 0;
    values[i] = scale * static_cast<float>(integers[i]);
  }
  return outside == 0;
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

std::vector<uint8_t> CodeValues(ValueFormat format, const float* values, size_t n) {
  if (BitsOf(format) == 0 || n == 0) return {};
  std::vector<uint8_t> out(kCodedHead);
  const int largest = LargestOf(BitsOf(format));
  const float inverse = WriteScale(values, n, largest, out.data());
  std::vector<int32_t> integers(n);
  ToIntegers(values, n, inverse, largest, integers.data());
  const CodedIntegers coded = EncodeIntegers(integers);
  if (out.size() + coded.payload.size() >= BytesOf(format, n)) return {};
  out[sizeof(float)] = static_cast<uint8_t>(coded.bits);
  out.insert(out.end(), coded.payload.begin(), coded.payload.end());
  return out;
}

absl::Status ReadCodedValues(ValueFormat format, std::span<const uint8_t> payload, size_t n, float* values) {
  if (BitsOf(format) == 0 || n == 0 || payload.size() < kCodedHead ||
      !MayHoldIntegers(payload.subspan(kCodedHead), payload[sizeof(float)], n)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d coded values of format %d in %d bytes", n, static_cast<int>(format), payload.size()));
  }
  float scale = 0;
  GW_RETURN_IF_ERROR(ReadScale(payload, &scale));
  std::vector<int32_t> integers(n);
  GW_RETURN_IF_ERROR(DecodeIntegers(payload.subspan(kCodedHead), payload[sizeof(scale)], n, integers.data()));
  if (!OfIntegers(integers.data(), n, scale, LargestOf(BitsOf(format)), values))
    return absl::InvalidArgumentError(absl::StrFormat("coded values: an integer of more than %d bits", BitsOf(format)));
  return absl::OkStatus();
}

size_t BytesOf(ValueFormat format, size_t n) {
  switch (format) {
    case ValueFormat::kFp32:
      return 4 * n;
    case ValueFormat::kFp16:
    case ValueFormat::kBf16:
      return 2 * n;
    case ValueFormat::kInt8:
    case ValueFormat::kInt6:
    case ValueFormat::kInt4:
      return n == 0 ? 0 : sizeof(float) + (n * BitsOf(format) + 7) / 8;
    case ValueFormat::k2Bit:
      return n == 0 ? 0 : 8 + (n + 3) / 4;
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
        const uint16_t bits = kernels::SplitBf16(values[i], kernels::kLargestBf16, &rest);
        std::memcpy(out + 2 * i, &bits, 2);
      }
      return;
    case ValueFormat::kInt8:
    case ValueFormat::kInt6:
    case ValueFormat::kInt4:
      return WriteIntegers(BitsOf(format), values, n, out);
    case ValueFormat::k2Bit:
      return WriteTwoBits(values, n, out);
  }
}

absl::Status ReadValues(ValueFormat format, std::span<const uint8_t> payload, size_t n, float* values) {
  if (payload.size() != BytesOf(format, n)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d values take %d bytes, found %d", n, BytesOf(format, n), payload.size()));
  }
  if (n == 0) return absl::OkStatus();
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
    case ValueFormat::kInt6:
    case ValueFormat::kInt4:
      return ReadIntegers(BitsOf(format), payload, n, values);
    case ValueFormat::k2Bit:
      return ReadTwoBits(payload, n, values);
  }
  return absl::OkStatus();
}

}  // namespace gradwire
