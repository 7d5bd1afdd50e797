// The loops over runs that quantizers are made of, vectorised by the compiler; the same bits with any instructions.
// Sums are taken in eight partial sums, in float64.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::quantized {

// Signs, one bit each, 1 where x >= 0 (so is -0), in (n + 7) / 8 bytes; and back, as one of two values.
void WriteSigns(const float* x, size_t n, uint8_t* out);
void ReadSigns(const uint8_t* in, size_t n, float positive, float negative, float* out);

// Of elements first .. first + n: digit 1 + sign(x) with probability |x| / scale, else 1.
void TernaryDigits(const float* x, size_t n, float scale, uint64_t salt, size_t first, uint8_t* digits);

// Zigzag codes of signed levels: even levels of `norm`, up to `levels`; or the powers of two below it. norm > 0.
void LinearCodes(const float* x, size_t n, float norm, int32_t levels, uint64_t salt, size_t first, uint8_t* codes);
void NaturalCodes(const float* x, size_t n, float norm, int32_t levels, uint64_t salt, size_t first, uint8_t* codes);
uint8_t LargestCode(const uint8_t* codes, size_t n);
// What they stand for.
void LinearValues(const uint8_t* codes, size_t n, float norm, int32_t levels, float* out);
void NaturalValues(const uint8_t* codes, size_t n, float norm, int32_t levels, float* out);

}  // namespace gradwire::quantized
