// See sums.h.
#include "common/codec/sparse/sums.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "kernels/math/grid.h"

namespace gradwire::sparse {
namespace {

absl::Status SentTooOften(int64_t position) {
  return absl::InvalidArgumentError(absl::StrFormat("element %d was sent by more workers than the job has", position));
}

uint64_t PagesOf(uint64_t elements, uint32_t page) { return (elements + page - 1) / page; }

}  // namespace

WholeSums::WholeSums(const CodecContext& context)
    : bytes_(MostBytes(context)),
      sums_(context),
      counts_(context.layout->elements, context.job->spec().max_workers()) {}

size_t WholeSums::MostBytes(const CodecContext& context) {
  return GridSums::Bytes(*context.layout) +
         tagc::PositionCounters::Bytes(context.layout->elements, context.job->spec().max_workers());
}

void WholeSums::Clear() {
  sums_.Clear(counts_.Union());
  counts_.Clear();
}

absl::Status WholeSums::Add(const Pairs& pairs) {
  GW_RETURN_IF_ERROR(
      sums_.Check(pairs.values.data(), pairs.values.size(), [&](size_t i) { return pairs.positions[i]; }));
  if (const int64_t full = counts_.Increment(pairs.positions); full >= 0) return SentTooOften(full);
  sums_.Add(pairs.positions, pairs.values.data(), kernels::Sign::kAdd);
  return absl::OkStatus();
}

void WholeSums::Remove(const Pairs& pairs) {
  sums_.Add(pairs.positions, pairs.values.data(), kernels::Sign::kSubtract);
  counts_.Decrement(pairs.positions);
}

void WholeSums::TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out) {
  sums_.TakeMeans(positions, contributors, out);
  counts_.Clear();
}

PagedSums::PagedSums(const CodecContext& context)
    : context_(context),
      limit_bits_(GridLimitBits(*context.job)),
      planes_(static_cast<uint32_t>(std::bit_width(context.job->spec().max_workers()))),
      slots_(PagesOf(context.layout->elements, kPage), kNone) {}

size_t PagedSums::MostBytes(const CodecContext& context) {
  const uint64_t pages = PagesOf(context.layout->elements, kPage);
  const auto planes = static_cast<uint64_t>(std::bit_width(context.job->spec().max_workers()));
  return pages * (2 * sizeof(uint32_t) + kPage * sizeof(int64_t) + planes * sizeof(uint64_t));
}

size_t PagedSums::memory_bytes() const {
  return (slots_.capacity() + pages_.capacity()) * sizeof(uint32_t) +
         (sums_.capacity() + counts_.capacity()) * sizeof(int64_t);
}

template <typename Fn>
void PagedSums::ForEachPage(std::span<const uint32_t> positions, Fn fn) const {
  for (size_t first = 0, last = 0; first < positions.size(); first = last) {
    const uint32_t page = positions[first] / kPage;
    uint64_t mask = 0;
    for (; last < positions.size() && positions[last] / kPage == page; ++last)
      mask |= uint64_t{1} << (positions[last] % kPage);
    fn(slots_[page] - 1, mask, first, last);
  }
}

void PagedSums::MakeSlots(std::span<const uint32_t> positions) {
  size_t missing = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    const uint32_t page = positions[i] / kPage;
    const bool first_of_page = i == 0 || positions[i - 1] / kPage != page;
    if (first_of_page && slots_[page] == kNone) ++missing;
  }
  if (missing == 0) return;
  // Room first: without memory for all of them everything stays as it is.
  const size_t slots = pages_.size() + missing;
  if (slots > pages_.capacity()) {
    const size_t room = std::min(slots_.size(), std::max(slots, 2 * pages_.capacity()));
    pages_.reserve(room);
    sums_.reserve(room * kPage);
    counts_.reserve(room * planes_);
  }
  sums_.resize(std::max(sums_.size(), slots * kPage));
  counts_.resize(std::max(counts_.size(), slots * planes_));
  for (const uint32_t position : positions) {
    uint32_t& slot = slots_[position / kPage];
    if (slot != kNone) continue;
    pages_.push_back(position / kPage);
    slot = static_cast<uint32_t>(pages_.size());
  }
}

int64_t PagedSums::Count(std::span<const uint32_t> positions) {
  uint64_t lost = 0;
  ForEachPage(positions, [&](uint32_t slot, uint64_t carry, size_t, size_t) {
    uint64_t* const plane = &counts_[size_t{slot} * planes_];
    for (uint32_t p = 0; carry != 0 && p < planes_; ++p) carry &= std::exchange(plane[p], plane[p] ^ carry);
    lost |= carry;
  });
  if (lost == 0) return -1;
  Uncount(positions);
  int64_t found = -1;
  ForEachPage(positions, [&](uint32_t slot, uint64_t full, size_t, size_t) {
    const uint64_t* const plane = &counts_[size_t{slot} * planes_];
    for (uint32_t p = 0; full != 0 && p < planes_; ++p) full &= plane[p];
    if (full != 0 && found < 0) found = int64_t{pages_[slot]} * kPage + std::countr_zero(full);
  });
  return found;
}

void PagedSums::Uncount(std::span<const uint32_t> positions) {
  ForEachPage(positions, [&](uint32_t slot, uint64_t borrow, size_t, size_t) {
    uint64_t* const plane = &counts_[size_t{slot} * planes_];
    for (uint32_t p = 0; borrow != 0 && p < planes_; ++p) borrow &= ~std::exchange(plane[p], plane[p] ^ borrow);
  });
}

void PagedSums::AddValues(const Pairs& pairs, kernels::Sign sign) {
  constexpr size_t kBatch = 256;
  uint64_t grid[kBatch];
  size_t converted = 0, base = 0;  // grid[i] is that of values[base + i]
  ForEachPage(pairs.positions, [&](uint32_t slot, uint64_t, size_t first, size_t last) {
    if (last > converted) {
      base = first;
      converted = std::min(pairs.values.size(), base + kBatch);
      GridValues(&pairs.values[base], converted - base, sign, grid);
    }
    int64_t* const sums = &sums_[size_t{slot} * kPage];
    for (size_t i = first; i < last; ++i) {
      int64_t& sum = sums[pairs.positions[i] % kPage];
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + grid[i - base]);
    }
  });
}

absl::Status PagedSums::Add(const Pairs& pairs) {
  GW_RETURN_IF_ERROR(CheckOnGrid(context_, limit_bits_, pairs.values.data(), pairs.values.size(),
                                 [&](size_t i) { return pairs.positions[i]; }));
  MakeSlots(pairs.positions);
  if (const int64_t full = Count(pairs.positions); full >= 0) return SentTooOften(full);
  AddValues(pairs, kernels::Sign::kAdd);
  return absl::OkStatus();
}

void PagedSums::Remove(const Pairs& pairs) {
  AddValues(pairs, kernels::Sign::kSubtract);
  Uncount(pairs.positions);
}

uint64_t PagedSums::Sent(uint32_t slot) const {
  uint64_t sent = 0;
  for (uint32_t p = 0; p < planes_; ++p) sent |= counts_[size_t{slot} * planes_ + p];
  return sent;
}

std::vector<uint32_t> PagedSums::Union() const {
  std::vector<uint32_t> pages = pages_;
  std::sort(pages.begin(), pages.end());
  size_t n = 0;
  for (uint32_t slot = 0; slot < pages.size(); ++slot) n += static_cast<size_t>(std::popcount(Sent(slot)));
  std::vector<uint32_t> positions;
  positions.reserve(n);
  for (const uint32_t page : pages) {
    for (uint64_t sent = Sent(slots_[page] - 1); sent != 0; sent &= sent - 1)
      positions.push_back(page * kPage + static_cast<uint32_t>(std::countr_zero(sent)));
  }
  return positions;
}

uint64_t PagedSums::Total() const {
  uint64_t total = 0;
  for (size_t i = 0; i < pages_.size() * planes_; ++i)
    total += static_cast<uint64_t>(std::popcount(counts_[i])) << (i % planes_);
  return total;
}

void PagedSums::TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out) {
  const float unit = kernels::PowerOfTwo(-kernels::kGridBits);
  ForEachPage(positions, [&](uint32_t slot, uint64_t, size_t first, size_t last) {
    int64_t* const sums = &sums_[size_t{slot} * kPage];
    for (size_t i = first; i < last; ++i)
      out[i] = kernels::GridMean(std::exchange(sums[positions[i] % kPage], 0), unit, static_cast<float>(contributors));
  });
  Clear();
}

void PagedSums::Means(uint64_t begin, uint32_t count, uint32_t contributors, float* out) const {
  const float unit = kernels::PowerOfTwo(-kernels::kGridBits);
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t slot = slots_[(begin + i) / kPage];
    const int64_t sum = slot == kNone ? 0 : sums_[size_t{slot - 1} * kPage + (begin + i) % kPage];
    out[i] = kernels::GridMean(sum, unit, static_cast<float>(contributors));
  }
}

void PagedSums::Clear() {
  // Sums of what nobody sent, or no more, are 0.
  for (uint32_t slot = 0; slot < pages_.size(); ++slot) {
    for (uint64_t sent = Sent(slot); sent != 0; sent &= sent - 1)
      sums_[size_t{slot} * kPage + static_cast<size_t>(std::countr_zero(sent))] = 0;
    slots_[pages_[slot]] = kNone;
  }
  std::fill_n(counts_.begin(), pages_.size() * planes_, uint64_t{0});
  pages_.clear();
}

}  // namespace gradwire::sparse
