// Reference backend: dense merging and fixed point.
#include <algorithm>
#include <cstring>

#include "kernels/backend.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/math/grid.h"

namespace gradwire::kernels::reference {
namespace {

template <typename T>
T Load(const uint8_t* p, size_t i) {
  T v;
  std::memcpy(&v, p + i * sizeof(T), sizeof(T));
  return v;
}

template <typename T>
void Store(uint8_t* p, size_t i, T v) {
  std::memcpy(p + i * sizeof(T), &v, sizeof(T));
}

template <typename T>
inline __attribute__((always_inline)) void AddAs(int32_t* acc, const uint8_t* values, size_t n, uint32_t sign) {
  for (size_t i = 0; i < n; ++i) {
    // Unsigned arithmetic wraps; multiplying by 1 or 2^32 - 1 adds or subtracts.
    acc[i] = static_cast<int32_t>(static_cast<uint32_t>(acc[i]) + sign * static_cast<uint32_t>(Load<T>(values, i)));
  }
}

template <typename T>
inline __attribute__((always_inline)) void QuantizeAs(float* x, size_t n, float inverse, float unit, float limit,
                                                      uint8_t* q) {
  for (size_t i = 0; i < n; ++i) {
    float rest;
    const int32_t v = QuantizeOne(x[i], inverse, unit, limit, &rest);
    x[i] = rest;
    Store<T>(q, i, static_cast<T>(v));
  }
}

template <typename T>
inline __attribute__((always_inline)) void DequantizeAs(const uint8_t* q, size_t n, float unit, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] += static_cast<float>(Load<T>(q, i)) * unit;
}

inline uint32_t FloatBitsAt(const uint8_t* values, int width, size_t i) {
  return width == 4 ? Load<uint32_t>(values, i) : static_cast<uint32_t>(Load<uint16_t>(values, i)) << 16;
}

inline __attribute__((always_inline)) void AddFloatsAs(int64_t* acc, const uint8_t* values, int width, size_t n,
                                                       Sign sign) {
  const uint64_t flip = sign == Sign::kSubtract ? ~uint64_t{0} : 0;  // (v ^ flip) - flip is v or -v
  for (size_t i = 0; i < n; ++i) {
    const uint64_t grid = ToGrid(FloatFromBits(FloatBitsAt(values, width, i)));
    acc[i] = static_cast<int64_t>(static_cast<uint64_t>(acc[i]) + ((grid ^ flip) - flip));
  }
}

}  // namespace

GW_CLONES void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, uint32_t sign) {
  switch (width) {
    case 1:
      AddAs<int8_t>(acc, values, n, sign);
      break;
    case 2:
      AddAs<int16_t>(acc, values, n, sign);
      break;
    default:
      AddAs<int32_t>(acc, values, n, sign);
      break;
  }
}

GW_CLONES void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign) {
  if (width == 4) {
    AddFloatsAs(acc, values, 4, n, sign);
  } else {
    AddFloatsAs(acc, values, 2, n, sign);
  }
}

GW_CLONES void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n) {
  switch (width) {
    case 1:
      for (size_t i = 0; i < n; ++i) acc[i] = Load<int8_t>(values, i);
      break;
    case 2:
      for (size_t i = 0; i < n; ++i) acc[i] = Load<int16_t>(values, i);
      break;
    default:
      if (n != 0) std::memcpy(acc, values, n * sizeof(int32_t));
      break;
  }
}

GW_CLONES bool AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range) {
  uint32_t outside = 0;
  for (size_t i = 0; i < n; ++i) {
    const auto word = Load<uint32_t>(values, i);
    outside |= static_cast<uint32_t>(!range.Holds(word));
    acc[i] = static_cast<int32_t>(word);
  }
  return outside == 0;
}

GW_CLONES void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n) {
  if (width == 4) {
    for (size_t i = 0; i < n; ++i) acc[i] = static_cast<int64_t>(ToGrid(FloatFromBits(FloatBitsAt(values, 4, i))));
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] = static_cast<int64_t>(ToGrid(FloatFromBits(FloatBitsAt(values, 2, i))));
  }
}

GW_CLONES uint32_t LargestMagnitude(const uint8_t* values, int width, size_t n) {
  uint32_t largest = 0;
  if (width == 4) {
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, Load<uint32_t>(values, i) & 0x7FFFFFFFu);
  } else {
    for (size_t i = 0; i < n; ++i) {
      largest = std::max(largest, (static_cast<uint32_t>(Load<uint16_t>(values, i)) << 16) & 0x7FFFFFFFu);
    }
  }
  return largest;
}

int64_t FindMagnitude(const uint8_t* values, int width, size_t n, uint32_t limit_bits) {
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    if (LargestMagnitude(values + begin * static_cast<size_t>(width), width, count) < limit_bits) continue;
    for (size_t i = begin; i < begin + count; ++i) {
      if ((FloatBitsAt(values, width, i) & 0x7FFFFFFFu) >= limit_bits) return static_cast<int64_t>(i);
    }
  }
  return -1;
}

void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out) {
  const float unit = PowerOfTwo(-kGridBits);
  const float count = static_cast<float>(contributors);
  for (size_t i = 0; i < n; ++i) out[i] = GridMean(acc[i], unit, count);
}

void FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out) {
  const float unit = PowerOfTwo(-kGridBits);
  const float count = static_cast<float>(contributors);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t sum = ToGrid(FloatFromBits(FloatBitsAt(values, width, i)));
    out[i] = GridMean(static_cast<int64_t>(sum), unit, count);
  }
}

GW_CLONES void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q) {
  const float inverse = PowerOfTwo(-exponent);
  const float unit = PowerOfTwo(exponent);
  const float bound = LargestFloatWithin(limit);
  switch (width) {
    case 1:
      QuantizeAs<int8_t>(x, n, inverse, unit, bound, q);
      break;
    case 2:
      QuantizeAs<int16_t>(x, n, inverse, unit, bound, q);
      break;
    default:
      QuantizeAs<int32_t>(x, n, inverse, unit, bound, q);
      break;
  }
}

GW_CLONES void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x) {
  const float unit = PowerOfTwo(exponent);
  switch (width) {
    case 1:
      DequantizeAs<int8_t>(q, n, unit, x);
      break;
    case 2:
      DequantizeAs<int16_t>(q, n, unit, x);
      break;
    default:
      DequantizeAs<int32_t>(q, n, unit, x);
      break;
  }
}

GW_CLONES void SplitBf16(float* x, size_t n, float largest, uint8_t* out) {
  for (size_t i = 0; i < n; ++i) {
    float rest;
    Store<uint16_t>(out, i, kernels::SplitBf16(x[i], largest, &rest));
    x[i] = rest;
  }
}

GW_CLONES void AddBf16(const uint8_t* values, size_t n, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] += Bf16ToFloat(Load<uint16_t>(values, i));
}

int RangeOf(const float* x, size_t n) {
  const uint32_t largest = LargestMagnitude(reinterpret_cast<const uint8_t*>(x), 4, n);
  return largest == 0 ? kMinRange : std::clamp(RangeOfBits(largest), kMinRange, kMaxRange);
}

}  // namespace gradwire::kernels::reference
