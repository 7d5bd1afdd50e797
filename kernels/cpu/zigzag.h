// Integers as codes of a fixed width, one behind the other from the lowest bit on: 0, -1, 1, -2 ... are 0, 1, 2, 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::kernels {

inline uint32_t ZigZag(int32_t v) { return (static_cast<uint32_t>(v) << 1) ^ static_cast<uint32_t>(v >> 31); }
inline int32_t UnZigZag(uint32_t v) { return static_cast<int32_t>((v >> 1) ^ (0u - (v & 1u))); }

// Codes of these widths are packed here; narrower ones are unpacked as well.
inline constexpr int kLeastPackedBits = 4;
inline constexpr int kMostPackedBits = 28;

// Packs values from the first on, as long as whole words of `out` are left; returns how many, a multiple of 8. The
// bytes behind their codes may be overwritten. By the best instructions of the machine it runs on.
size_t PackZigZag(std::span<const int32_t> values, int bits, std::span<uint8_t> out);
// Unpacks at most n codes to `out`, as long as whole words of `packed` are left; returns how many, a multiple of 8.
size_t UnpackZigZag(std::span<const uint8_t> packed, int bits, size_t n, int32_t* out);

// The same on any machine.
size_t PackZigZagByPair(std::span<const int32_t> values, int bits, std::span<uint8_t> out);
size_t UnpackZigZagByPair(std::span<const uint8_t> packed, int bits, size_t n, int32_t* out);

}  // namespace gradwire::kernels
