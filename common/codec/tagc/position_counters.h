// How many workers sketched each position: bit-sliced counters, so that the union is cheap and taking a frame back is
// exact.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/bitmap.h"

namespace gradwire::tagc {

// planes_[p] holds bit p of the count of every position. Not thread-safe.
class PositionCounters {
 public:
  PositionCounters(uint64_t elements, uint32_t max_count)
      : words_((elements + 63) / 64), planes_(static_cast<size_t>(std::bit_width(max_count)) * words_, 0) {}

  static size_t Bytes(uint64_t elements, uint32_t max_count) {
    return (elements + 63) / 64 * static_cast<size_t>(std::bit_width(max_count)) * sizeof(uint64_t);
  }

  void Clear() { std::fill(planes_.begin(), planes_.end(), uint64_t{0}); }

  // Adds 1 to the count of each of `positions` (ascending) and returns -1; or returns the first of them whose count
  // cannot grow any further, and changes nothing. Precondition: all are below `elements`.
  int64_t Increment(std::span<const uint32_t> positions) {
    uint64_t lost = 0;
    ForEachWord(positions, [&](size_t word, uint64_t carry) {
      for (size_t w = word; carry != 0 && w < planes_.size(); w += words_) {
        const uint64_t next = planes_[w] & carry;
        planes_[w] ^= carry;
        carry = next;
      }
      lost |= carry;
    });
    if (lost == 0) return -1;
    Decrement(positions);
    return FirstFull(positions);
  }

  // Exactly undoes an Increment.
  void Decrement(std::span<const uint32_t> positions) {
    ForEachWord(positions, [&](size_t word, uint64_t borrow) {
      for (size_t w = word; borrow != 0 && w < planes_.size(); w += words_) {
        const uint64_t next = ~planes_[w] & borrow;
        planes_[w] ^= borrow;
        borrow = next;
      }
    });
  }

  // The sum of all counts: how many positions the frames named, each frame by itself.
  uint64_t Total() const {
    uint64_t total = 0;
    for (size_t w = 0; w < planes_.size(); ++w) {
      total += static_cast<uint64_t>(std::popcount(planes_[w])) << (w / words_);
    }
    return total;
  }

  // Positions with a count above 0, ascending.
  std::vector<uint32_t> Union() const {
    if (words_ == 0) return {};
    std::vector<uint64_t> any(words_);
    const size_t n = kernels::UnionOf(planes_.data(), planes_.size() / words_, words_, any.data());
    std::vector<uint32_t> out(n + kernels::kIndexRoom);
    kernels::IndicesOf(any.data(), words_, 0, out.data());
    out.resize(n);
    return out;
  }

  size_t memory_bytes() const { return planes_.size() * sizeof(uint64_t); }

 private:
  int64_t FirstFull(std::span<const uint32_t> positions) const {
    int64_t found = -1;
    ForEachWord(positions, [&](size_t word, uint64_t full) {
      for (size_t w = word; full != 0 && w < planes_.size(); w += words_) full &= planes_[w];
      if (full != 0 && found < 0) found = static_cast<int64_t>(word * 64) + std::countr_zero(full);
    });
    return found;
  }

  // Calls fn(word, mask) for positions of a 64-bit word: once for all of them, or for each by itself where it cannot be
  // foreseen whether the next one is in the same word.
  template <typename Fn>
  static void ForEachWord(std::span<const uint32_t> positions, Fn fn) {
    if (!Foreseeable(positions)) {
      for (const uint32_t position : positions) fn(position / 64, uint64_t{1} << (position % 64));
      return;
    }
    for (size_t i = 0; i < positions.size();) {
      const size_t word = positions[i] / 64;
      uint64_t mask = 0;
      for (; i < positions.size() && positions[i] / 64 == word; ++i) mask |= uint64_t{1} << (positions[i] % 64);
      fn(word, mask);
    }
  }

  // Of a few neighbours hardly any share a word, or most do.
  static bool Foreseeable(std::span<const uint32_t> positions) {
    constexpr size_t kLooks = 32;
    if (positions.size() < 4 * kLooks) return true;
    size_t shared = 0;
    for (size_t look = 0; look < kLooks; ++look) {
      const size_t i = look * (positions.size() - 1) / kLooks;
      shared += positions[i] / 64 == positions[i + 1] / 64 ? 1 : 0;
    }
    return shared <= kLooks / 8 || shared >= kLooks * 3 / 4;
  }

  size_t words_;
  std::vector<uint64_t> planes_;  // plane after plane, words_ each
};

}  // namespace gradwire::tagc
