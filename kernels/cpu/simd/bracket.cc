// See bracket.h.
#include "kernels/cpu/simd/bracket.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/math/select.h"

namespace gradwire::kernels {
namespace {

constexpr size_t kLeastElements = 1 << 14;  // below, two histograms are as fast
constexpr size_t kLeastLines = 1024;        // in the sample
constexpr size_t kStrideLines = 64;         // of which one is sampled, unless that gives fewer than kLeastLines
constexpr uint32_t kTop = 1u << 31;         // above every magnitude
constexpr int kWholeShift = 16;             // of all magnitudes: bins by 8 exponent and 7 mantissa bits
constexpr size_t kBins = kTop >> kWholeShift;
constexpr size_t kBlock = 256;  // bins that are skipped together
constexpr double kFull = 0.75;  // of the room for a bracket, as far as a sample tells
// Magnitudes within a line are not independent, so the margin is several times the root of the sample.
constexpr double kDeviations = 4;
constexpr double kDrift = 0.005;
constexpr int kAttempts = 3;

size_t StrideLines(size_t n) { return std::clamp<size_t>(n / kSampleLine / kLeastLines, 1, kStrideLines); }

double Margin(double sampled) { return kDeviations * std::sqrt(sampled) + kDrift * sampled + 8; }

// Lines of `among`, of which the first guess is made.
LineSample FewOf(const LineSample& among) {
  LineSample few = {.stride = StrideLines(among.size)};
  few.size = among.size / (few.stride * kSampleLine) * kSampleLine;
  return few;
}

// Room for twice what a bracket of the first attempt should hold, and then some.
size_t Capacity(size_t n, double wanted) {
  const double per_sample = static_cast<double>(StrideLines(n));
  const double elements = 2 * Margin(wanted / per_sample) * per_sample;
  return static_cast<size_t>(std::min(2 * elements, static_cast<double>(n))) + 8192;
}

}  // namespace

BracketSearch::BracketSearch(const float* x, const LineSample& among)
    : x_(x),
      among_(among),
      few_(FewOf(among)),
      bins_(kBins * sizeof(uint32_t)),
      blocks_(kBins / kBlock * sizeof(uint32_t)),
      collected_(Capacity(among.size, std::clamp(among.wanted, 0.0, static_cast<double>(among.size))) *
                 sizeof(uint32_t)) {
  if (among.size < kLeastElements || !(among.wanted > 0) || among.wanted > 0.5 * static_cast<double>(among.size)) {
    return;
  }
  bracket_.collected = collected_.u32();
  bracket_.capacity = Capacity(among.size, among.wanted);
  per_sample_ = static_cast<double>(among_.size) / static_cast<double>(few_.size);
  sampled_ = among_.wanted / per_sample_;
  margin_ = Margin(sampled_);
}

template <class Count>
void BracketSearch::ForEachSampled(const Count& count) const {
  const size_t lines = few_.size / kSampleLine;
  const auto line_at = [&](size_t line) { return x_ + among_.At(few_.LineAt(line) * kSampleLine); };
  constexpr size_t kAhead = 16;
  for (size_t line = 0; line < lines; ++line) {
    if (line + kAhead < lines) __builtin_prefetch(line_at(line + kAhead));
    const float* const values = line_at(line);
    for (size_t i = 0; i < kSampleLine; ++i) count(FloatBits(values[i]) & 0x7FFFFFFFu);
  }
}

void BracketSearch::Look(uint32_t low, uint32_t high) {
  begin_ = low;
  above_ = 0;
  uint32_t* const bins = bins_.u32();
  std::fill(bins, bins + kBins, 0u);
  if (low == 0 && high == kTop) {
    bin_shift_ = kWholeShift;
    ForEachSampled([bins](uint32_t magnitude) { ++bins[magnitude >> kWholeShift]; });
  } else {
    bin_shift_ = kKeyShift;
    while ((high - low) >> bin_shift_ > kBins) ++bin_shift_;
    uint64_t above = 0;
    const int shift = bin_shift_;
    ForEachSampled([&](uint32_t magnitude) {
      if (magnitude - low < high - low) {
        ++bins[(magnitude - low) >> shift];
      } else {
        above += magnitude >= high ? 1 : 0;
      }
    });
    above_ = above;
  }
  for (size_t block = 0; block < kBins / kBlock; ++block) {
    uint32_t count = 0;
    for (size_t i = 0; i < kBlock; ++i) count += bins[block * kBlock + i];
    blocks_.u32()[block] = count;
  }
}

uint32_t BracketSearch::EdgeAbove(double count) const {
  const uint32_t* const bins = bins_.u32();
  const uint32_t* const blocks = blocks_.u32();
  uint64_t above = above_;
  size_t block = kBins / kBlock;
  while (block > 0 && static_cast<double>(above + blocks[block - 1]) < count) above += blocks[--block];
  for (size_t bin = block * kBlock; bin-- > 0;) {
    above += bins[bin];
    if (static_cast<double>(above) >= count) return begin_ + (static_cast<uint32_t>(bin) << bin_shift_);
  }
  return begin_;
}

bool BracketSearch::Fits(uint32_t low, uint32_t high) const {
  const uint32_t* const bins = bins_.u32();
  uint64_t inside = 0;
  const size_t end = std::min<size_t>(kBins, (high - begin_) >> bin_shift_);
  for (size_t bin = (low - begin_) >> bin_shift_; bin < end; ++bin) inside += bins[bin];
  return static_cast<double>(inside) * per_sample_ < kFull * static_cast<double>(bracket_.capacity);
}

Bracket* BracketSearch::Next() {
  if (per_sample_ == 0 || attempt_ == kAttempts) return nullptr;
  if (attempt_ == 0 || begin_ != 0) Look(0, kTop);
  ++attempt_;
  const double guess = sampled_ + shift_;
  const double fewest = guess - margin_;
  bracket_.low = EdgeAbove(guess + margin_);
  if (bracket_.low == 0) return nullptr;  // zeros would have to be told apart
  const uint32_t width = 1u << bin_shift_;
  const uint32_t last = EdgeAbove(fewest);
  bracket_.high = fewest <= 0 ? kTop : last + width;
  if (Fits(bracket_.low, bracket_.high)) return &bracket_;
  // Many lie close together: where within their bins the edges are.
  Look(bracket_.low, bracket_.low + width);
  bracket_.low = EdgeAbove(guess + margin_);
  if (fewest <= 0) return &bracket_;
  if (last != begin_) Look(last, last + width);
  bracket_.high = EdgeAbove(fewest) + (1u << bin_shift_);
  return &bracket_;
}

bool BracketSearch::Finish(Threshold* found) {
  const double above = static_cast<double>(bracket_.above);
  const double reached = above + static_cast<double>(bracket_.inside);
  // Were all non-zero elements wanted, `reached` could equal what is wanted; that case is the histograms'.
  if (above < among_.wanted && among_.wanted < reached) {
    *found = Exact();
    return true;
  }
  shift_ += above >= among_.wanted ? -2 * margin_ : 2 * margin_;
  return false;
}

Threshold BracketSearch::Exact() const {
  double wanted = among_.wanted - static_cast<double>(bracket_.above);
  const uint32_t first = bracket_.low >> kKeyShift;
  const uint32_t keys = (bracket_.high >> kKeyShift) - first;
  int shift = 0;
  while ((keys >> shift) > 4096) ++shift;
  // Once by the upper bits of the distance to the lowest key, once by the lower ones within the bin that is reached.
  std::vector<uint32_t> bins((keys >> shift) + 1, 0);
  const uint32_t* const end = bracket_.collected + bracket_.inside;
  for (const uint32_t* m = bracket_.collected; m != end; ++m) ++bins[((*m >> kKeyShift) - first) >> shift];
  uint32_t bin = static_cast<uint32_t>(bins.size()) - 1;
  while (bin > 0 && bins[bin] < wanted) wanted -= bins[bin--];
  if (shift == 0) return {.key = first + bin, .keep_below = ShareOfTies(wanted, bins[bin])};
  std::vector<uint32_t> fine(size_t{1} << shift, 0);
  for (const uint32_t* m = bracket_.collected; m != end; ++m) {
    const uint32_t distance = (*m >> kKeyShift) - first;
    if (distance >> shift == bin) ++fine[distance & ((1u << shift) - 1)];
  }
  uint32_t key = static_cast<uint32_t>(fine.size()) - 1;
  while (key > 0 && fine[key] < wanted) wanted -= fine[key--];
  return {.key = first + (bin << shift) + key, .keep_below = ShareOfTies(wanted, fine[key])};
}

}  // namespace gradwire::kernels
