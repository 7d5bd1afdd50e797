// See loops.h.
#include "common/codec/quantized/loops.h"

#include <algorithm>

#include "common/codec/bits/draw.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/math.h"

namespace gradwire::quantized {
namespace {

inline __attribute__((always_inline)) float MagnitudeOf(float x) {
  return kernels::FloatFromBits(kernels::FloatBits(x) & 0x7FFFFFFFu);
}

inline __attribute__((always_inline)) uint8_t ZigZagOf(float x, int32_t level) {
  return static_cast<uint8_t>(2 * level - static_cast<int32_t>((x < 0) & (level > 0)));
}

inline __attribute__((always_inline)) int32_t LevelOf(uint8_t code) { return (code + 1) >> 1; }
inline __attribute__((always_inline)) uint32_t SignOf(uint8_t code) { return static_cast<uint32_t>(code & 1) << 31; }

}  // namespace

GW_CLONES void WriteSigns(const float* x, size_t n, uint8_t* out) {
  for (size_t byte = 0; byte < n / 8; ++byte) {
    uint32_t bits = 0;
    for (size_t i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(x[8 * byte + i] >= 0) << i;
    out[byte] = static_cast<uint8_t>(bits);
  }
  if (n % 8 == 0) return;
  uint32_t bits = 0;
  for (size_t i = n / 8 * 8; i < n; ++i) bits |= static_cast<uint32_t>(x[i] >= 0) << (i % 8);
  out[n / 8] = static_cast<uint8_t>(bits);
}

GW_CLONES void ReadSigns(const uint8_t* in, size_t n, float positive, float negative, float* out) {
  const uint32_t off = kernels::FloatBits(negative);
  const uint32_t differing = off ^ kernels::FloatBits(positive);
  for (size_t byte = 0; byte < n / 8; ++byte) {
    const uint32_t bits = in[byte];
    for (uint32_t i = 0; i < 8; ++i)
      out[8 * byte + i] = kernels::FloatFromBits(off ^ (differing & (0u - (bits >> i & 1u))));
  }
  for (size_t i = n / 8 * 8; i < n; ++i) out[i] = (in[i / 8] >> (i % 8) & 1) != 0 ? positive : negative;
}

GW_CLONES void TernaryDigits(const float* x, size_t n, float scale, uint64_t salt, size_t first, uint8_t* digits) {
  const uint32_t begin = static_cast<uint32_t>(first);
  for (uint32_t i = 0; i < static_cast<uint32_t>(n); ++i) {
    // scale * draw < |x|: never true where x is 0, always where |x| is the scale or was clipped to it.
    const int32_t taken = static_cast<int32_t>(scale * UnitDraw(salt, begin + i) < MagnitudeOf(x[i]));
    digits[i] = static_cast<uint8_t>(1 + (x[i] > 0 ? taken : -taken));
  }
}

GW_CLONES void LinearCodes(const float* x, size_t n, float norm, int32_t levels, uint64_t salt, size_t first,
                           uint8_t* codes) {
  const uint32_t begin = static_cast<uint32_t>(first);
  const float scale = static_cast<float>(levels);
  for (uint32_t i = 0; i < static_cast<uint32_t>(n); ++i) {
    const float fraction = MagnitudeOf(x[i]) / norm;
    const float scaled = (fraction < 1.0f ? fraction : 1.0f) * scale;
    const int32_t low = static_cast<int32_t>(scaled);
    const int32_t up = static_cast<int32_t>(UnitDraw(salt, begin + i) < scaled - static_cast<float>(low));
    codes[i] = ZigZagOf(x[i], low + up);
  }
}

GW_CLONES void NaturalCodes(const float* x, size_t n, float norm, int32_t levels, uint64_t salt, size_t first,
                            uint8_t* codes) {
  const uint32_t begin = static_cast<uint32_t>(first);
  const uint32_t lowest = kernels::FloatBits(kernels::PowerOfTwo(1 - levels));
  for (uint32_t i = 0; i < static_cast<uint32_t>(n); ++i) {
    const float fraction = MagnitudeOf(x[i]) / norm;
    const uint32_t bits = kernels::FloatBits(fraction < 1.0f ? fraction : 1.0f);
    // The level below: 0, or that of the power of two that is not above the fraction.
    const uint32_t power = bits & 0x7F800000u;
    const int32_t below = std::max(static_cast<int32_t>(bits >> 23) - 127 + levels, 0);
    const float low = kernels::FloatFromBits(power & (0u - static_cast<uint32_t>(below > 0)));
    const float gap = kernels::FloatFromBits(std::max(power, lowest));
    const int32_t up = static_cast<int32_t>(low + UnitDraw(salt, begin + i) * gap < kernels::FloatFromBits(bits));
    codes[i] = ZigZagOf(x[i], below + up);
  }
}

GW_CLONES uint8_t LargestCode(const uint8_t* codes, size_t n) {
  uint8_t largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, codes[i]);
  return largest;
}

GW_CLONES void LinearValues(const uint8_t* codes, size_t n, float norm, int32_t levels, float* out) {
  const float scale = static_cast<float>(levels);
  for (size_t i = 0; i < n; ++i) {
    const float magnitude = norm * (static_cast<float>(LevelOf(codes[i])) / scale);
    out[i] = kernels::FloatFromBits(kernels::FloatBits(magnitude) ^ SignOf(codes[i]));
  }
}

GW_CLONES void NaturalValues(const uint8_t* codes, size_t n, float norm, int32_t levels, float* out) {
  for (size_t i = 0; i < n; ++i) {
    const int32_t level = LevelOf(codes[i]);
    const uint32_t power = static_cast<uint32_t>(level - levels + 127) << 23;
    const float fraction = kernels::FloatFromBits(power & (0u - static_cast<uint32_t>(level > 0)));
    out[i] = kernels::FloatFromBits(kernels::FloatBits(norm * fraction) ^ SignOf(codes[i]));
  }
}

}  // namespace gradwire::quantized
