// Counter-based draws of codecs: the same on every machine, from a salt and an index alone. Spec: proto/WIRE.md,
// "Sparse segments".
#pragma once

#include <cstdint>

namespace gradwire {

// 32 well mixed bits.
inline uint32_t DrawBits(uint64_t salt, uint64_t index) {
  uint32_t h = static_cast<uint32_t>(index) * 0x9E3779B9u ^ static_cast<uint32_t>(salt);
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15) ^ static_cast<uint32_t>(salt >> 32)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

// Uniform in [0, 1), 24 bits.
inline float UnitDraw(uint64_t salt, uint64_t index) {
  return static_cast<float>(static_cast<int32_t>(DrawBits(salt, index) >> 8)) * 0x1p-24f;
}

}  // namespace gradwire
