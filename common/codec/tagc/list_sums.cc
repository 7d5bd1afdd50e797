// See list_sums.h.
#include "common/codec/tagc/list_sums.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "absl/strings/str_format.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/tagc/list_segment.h"
#include "kernels/cpu/bitmap.h"
#include "kernels/cpu/reference/clones.h"

namespace gradwire::tagc {

using kernels::Sign;

namespace {

constexpr uint32_t kWordBits = 64;

// Calls fn(T*), T as wide as a cell.
template <typename Bytes, typename Fn>
auto WithCells(Bytes* bytes, int cell_bytes, Fn fn) {
  const auto as = [&]<typename T>(T) {
    using Cell = std::conditional_t<std::is_const_v<Bytes>, const T, T>;
    return fn(reinterpret_cast<Cell*>(bytes));
  };
  if (cell_bytes == 1) return as(uint8_t{});
  if (cell_bytes == 2) return as(uint16_t{});
  return as(uint32_t{});
}

// fn(i, cell) for the cell of each of positions[0 .. n). They lie far apart in long sums: each is fetched ahead.
template <typename Cell, typename Fn>
void ForEachCell(Cell* cells, const uint32_t* positions, size_t n, Fn fn) {
  constexpr size_t kAhead = 24;
  const size_t fetched = n > kAhead ? n - kAhead : 0;
  size_t i = 0;
  for (; i < fetched; ++i) {
    __builtin_prefetch(cells + positions[i + kAhead], std::is_const_v<Cell> ? 0 : 1);
    fn(i, cells[positions[i]]);
  }
  for (; i < n; ++i) fn(i, cells[positions[i]]);
}

GW_CLONES bool AllWithin(std::span<const int32_t> integers, int32_t limit) {
  const uint32_t least = static_cast<uint32_t>(-limit);
  uint32_t outside = 0;
  for (const int32_t v : integers)
    outside |= static_cast<uint32_t>(v) - least > 2 * static_cast<uint32_t>(limit) ? 1 : 0;
  return outside == 0;
}

}  // namespace

void ListSums::Clear() {
  // Only what was reached: the sums are long. Without memory of its own, so that it cannot stop half way.
  if (dirty_) {
    WithCells(sums_.data(), shape_.cell_bytes, [&](auto* sums) {
      for (size_t w = 0; w < reached_.size(); ++w) {
        for (uint64_t bits = reached_[w]; bits != 0; bits &= bits - 1) {
          const size_t page = w * kWordBits + static_cast<size_t>(std::countr_zero(bits));
          std::fill_n(sums + page * kPage, kPage, 0);
        }
      }
    });
    std::fill(reached_.begin(), reached_.end(), 0);
  }
  dirty_ = false;
  entries_ = 0;
}

absl::Status ListSums::Add(const wire::Segment& s) {
  const absl::Status read = Read(s);
  if (read.ok() && !positions_.empty()) {
    if (sums_.empty()) {
      reached_.resize(Words(shape_));
      sums_.resize(SumBytes(shape_));  // last: it says that both are there
    }
    Merge(Sign::kAdd);
    dirty_ = true;
    entries_ += positions_.size();
  }
  if (positions_.capacity() > 2 * kMostListed) {  // more than our workers write: of no use to the next list
    positions_ = {};
    integers_ = {};
    scratch_ = {};
  }
  return read;
}

void ListSums::Remove(const wire::Segment& s) {
  if (!Read(s).ok()) return;  // it was read once already, by Add
  if (positions_.empty()) return;
  Merge(Sign::kSubtract);
  entries_ -= positions_.size();
}

void ListSums::Merge(Sign sign) {
  WithCells(sums_.data(), shape_.cell_bytes, [&](auto* sums) {
    using Cell = std::remove_reference_t<decltype(*sums)>;
    const uint32_t* const positions = positions_.data();
    const int32_t* const integers = integers_.data();
    uint64_t* const reached = reached_.data();
    if (sign == Sign::kAdd) {
      ForEachCell(sums, positions, positions_.size(), [=](size_t i, Cell& sum) {
        sum = static_cast<Cell>(sum + static_cast<Cell>(integers[i]));
        const uint32_t page = positions[i] / kPage;
        reached[page / kWordBits] |= uint64_t{1} << (page % kWordBits);
      });
    } else {
      ForEachCell(sums, positions, positions_.size(),
                  [=](size_t i, Cell& sum) { sum = static_cast<Cell>(sum - static_cast<Cell>(integers[i])); });
    }
  });
}

void ListSums::Take(std::vector<uint32_t>* positions, std::vector<int32_t>* integers) {
  positions->clear();
  integers->clear();
  if (!dirty_) return;
  std::vector<uint32_t> pages(reached_.size() * kWordBits + kernels::kIndexRoom);
  pages.resize(kernels::IndicesOf(reached_.data(), reached_.size(), 0, pages.data()));
  const auto make_room = [&](size_t entries) {
    positions->resize(entries + kPage + kernels::kIndexRoom);
    integers->resize(positions->size());
  };
  make_room(std::min(entries_, shape_.elements()) / 2);  // lists share elements; it grows where they do not
  size_t n = 0;
  WithCells(sums_.data(), shape_.cell_bytes, [&](auto* sums) {
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < pages.size(); ++i) {
      __builtin_prefetch(sums + size_t{pages[std::min(i + kAhead, pages.size() - 1)]} * kPage, 1);
      if (positions->size() < n + kPage + kernels::kIndexRoom) make_room(2 * n);
      n += kernels::TakeNonzero(sums + size_t{pages[i]} * kPage, pages[i] * kPage, positions->data() + n,
                                integers->data() + n);
    }
  });
  positions->resize(n);
  integers->resize(n);
  std::fill(reached_.begin(), reached_.end(), 0);
  dirty_ = false;
  entries_ = 0;
}

absl::Status ListSums::Read(const wire::Segment& s) {
  positions_.clear();  // integers_ keep their length, so that nothing is filled twice
  const LookAhead ahead = sums_.empty() ? LookAhead{} : LookAhead{sums_.data(), static_cast<size_t>(shape_.cell_bytes)};
  const absl::Status read = ReadList(s, ahead, &positions_, &integers_, &scratch_);
  if (!read.ok())
    return absl::InvalidArgumentError(absl::StrFormat("bucket %d: %s", shape_.layout().bucket, read.message()));
  if (AllWithin(integers_, shape_.limit)) return absl::OkStatus();
  size_t i = 0;
  while (integers_[i] <= shape_.limit && integers_[i] >= -shape_.limit) ++i;
  return absl::InvalidArgumentError(
      absl::StrFormat("bucket %d: list has %d for element %d; one worker's integers lie within %d",
                      shape_.layout().bucket, integers_[i], positions_[i], shape_.limit));
}

}  // namespace gradwire::tagc
