// See level_bits.h. Eight levels of b bits are b bytes, so eight are taken at a time.
#include "common/codec/bits/level_bits.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/reference/clones.h"

namespace gradwire {
namespace {

// Neighbours join: 8 numbers of `kBits` in the bytes of a word become 4 of twice as many in its 16-bit parts, 2, and 1.
template <int kBits>
inline __attribute__((always_inline)) uint64_t Join(uint64_t word) {
  constexpr uint64_t kBytes = 0x00FF00FF00FF00FFu, kPairs = 0x0000FFFF0000FFFFu, kHalf = 0xFFFFFFFFu;
  word = (word & kBytes) | (word & ~kBytes) >> (8 - kBits);
  word = (word & kPairs) | (word & ~kPairs) >> (16 - 2 * kBits);
  return (word & kHalf) | (word & ~kHalf) >> (32 - 4 * kBits);
}

// And back; what is above 8 * kBits is left out.
template <int kBits>
inline __attribute__((always_inline)) uint64_t Split(uint64_t word) {
  constexpr uint64_t kFour = (1ull << 4 * kBits) - 1, kTwo = 0x0000000100000001u * ((1ull << 2 * kBits) - 1),
                     kOne = 0x0001000100010001u * ((1ull << kBits) - 1);
  word = (word & kFour) | (word & kFour << 4 * kBits) << (32 - 4 * kBits);
  word = (word & kTwo) | (word & kTwo << 2 * kBits) << (16 - 2 * kBits);
  return (word & kOne) | (word & kOne << kBits) << (8 - kBits);
}

template <int kBits>
inline __attribute__((always_inline)) void Pack(const uint8_t* levels, size_t n, uint8_t* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8, out += kBits) {
    uint64_t word;
    std::memcpy(&word, levels + i, 8);
    word = Join<kBits>(word);
    std::memcpy(out, &word, kBits);
  }
  if (i == n) return;
  uint64_t word = 0;
  std::memcpy(&word, levels + i, n - i);
  word = Join<kBits>(word);
  std::memcpy(out, &word, LevelBytes(n - i, kBits));
}

template <int kBits>
inline __attribute__((always_inline)) bool Unpack(const uint8_t* in, size_t n, uint8_t* levels) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8, in += kBits) {
    uint64_t word = 0;
    std::memcpy(&word, in, kBits);
    word = Split<kBits>(word);
    std::memcpy(levels + i, &word, 8);
  }
  if (i == n) return true;
  uint64_t word = 0;
  std::memcpy(&word, in, LevelBytes(n - i, kBits));
  if (word >> ((n - i) * kBits) != 0) return false;
  word = Split<kBits>(word);
  std::memcpy(levels + i, &word, n - i);
  return true;
}

}  // namespace

GW_CLONES void PackLevels(const uint8_t* levels, size_t n, int bits, uint8_t* out) {
  switch (bits) {
    case 1:
      return Pack<1>(levels, n, out);
    case 2:
      return Pack<2>(levels, n, out);
    case 3:
      return Pack<3>(levels, n, out);
    case 4:
      return Pack<4>(levels, n, out);
    case 5:
      return Pack<5>(levels, n, out);
    case 6:
      return Pack<6>(levels, n, out);
    case 7:
      return Pack<7>(levels, n, out);
    default:
      std::copy(levels, levels + n, out);
  }
}

GW_CLONES bool UnpackLevels(const uint8_t* in, size_t n, int bits, uint8_t* levels) {
  switch (bits) {
    case 1:
      return Unpack<1>(in, n, levels);
    case 2:
      return Unpack<2>(in, n, levels);
    case 3:
      return Unpack<3>(in, n, levels);
    case 4:
      return Unpack<4>(in, n, levels);
    case 5:
      return Unpack<5>(in, n, levels);
    case 6:
      return Unpack<6>(in, n, levels);
    case 7:
      return Unpack<7>(in, n, levels);
    default:
      std::copy(in, in + n, levels);
      return true;
  }
}

}  // namespace gradwire
