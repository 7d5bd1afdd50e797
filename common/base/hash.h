// Counter-based pseudo-randomness: a pure function of its keys, the same on every party and every backend.
#pragma once

#include <cstdint>
#include <string_view>

namespace gradwire {

// Finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits with good avalanche.
constexpr uint64_t Mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

constexpr uint64_t HashCombine(uint64_t a, uint64_t b) { return Mix64(a ^ Mix64(b)); }

// FNV-1a with a final mix; for names and digests of small structures, not for untrusted hash tables.
constexpr uint64_t HashString(std::string_view s, uint64_t seed = 0) {
  uint64_t h = 0xCBF29CE484222325ull ^ seed;
  for (char c : s) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return Mix64(h);
}

}  // namespace gradwire
