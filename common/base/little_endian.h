// Numbers in byte formats: on the wire and in files they are little-endian, at any address.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace gradwire {

static_assert(std::endian::native == std::endian::little, "all byte formats are little-endian; add byte swaps here");

// T: an integer or floating-point type. The caller has checked that sizeof(T) bytes are there.
template <typename T>
T Load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
void Store(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof(v));
}

}  // namespace gradwire
