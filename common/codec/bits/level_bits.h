// Small unsigned numbers of a few bits each in a little-endian bit stream (bit_io.h): levels of quantizers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

inline size_t LevelBytes(size_t n, int bits) { return (n * static_cast<size_t>(bits) + 7) / 8; }

// Writes LevelBytes(n, bits) bytes; what is left of the last one is 0. `bits`: 1 to 8; levels are below 2^bits.
void PackLevels(const uint8_t* levels, size_t n, int bits, uint8_t* out);

// Reads LevelBytes(n, bits) bytes. False where what is left of the last one is not 0.
bool UnpackLevels(const uint8_t* in, size_t n, int bits, uint8_t* levels);

}  // namespace gradwire
