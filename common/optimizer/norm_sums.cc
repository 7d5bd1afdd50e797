// See norm_sums.h.
#include "common/optimizer/norm_sums.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

// A varint and a double for each total, and the message around all of it.
constexpr uint64_t kMessageOverheadBytes = 1024;
constexpr uint64_t kTensorBytes = 5;

// Calls fn(run, number) for every run of a shard.
template <typename Fn>
void ForEachRunOf(const Layout& layout, uint32_t shard, Fn fn) {
  size_t number = 0;
  for (uint32_t b = 0; b < layout.bucket_count(shard); ++b) {
    for (const Run& run : layout.at(b, shard).runs) fn(run, number++);
  }
}

}  // namespace

bool SkipsRound(std::span<const ShardSquares> of) {
  bool skips = false;
  for (const ShardSquares& shard : of) {
    if (shard.fate == v1::FATE_APPLIED) return false;
    skips = skips || shard.fate != v1::FATE_UNSPECIFIED;
  }
  return skips;
}

NormSums::NormSums(const Layout* layout, size_t tensors) : layout_(*layout) {
  struct Found {
    uint32_t tensor;
    uint64_t offset;
    Place place;
  };
  std::vector<Found> found;
  for (uint32_t s = 0; s < layout_.shard_count(); ++s) {
    std::vector<size_t>& first = first_run_.emplace_back(1, 0);
    for (uint32_t b = 0; b < layout_.bucket_count(s); ++b) first.push_back(first.back() + layout_.at(b, s).runs.size());
    ForEachRunOf(layout_, s, [&](const Run& run, size_t number) {
      found.push_back({run.tensor, run.offset, {s, static_cast<uint32_t>(number)}});
    });
  }
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return std::tie(a.tensor, a.offset) < std::tie(b.tensor, b.offset); });
  places_.reserve(found.size());
  for (const Found& f : found) {
    first_place_.resize(f.tensor + 1, places_.size());
    places_.push_back(f.place);
  }
  first_place_.resize(tensors + 1, places_.size());
}

std::vector<double> NormSums::Add(std::span<const ShardSquares> of, size_t norms) const {
  const size_t tensors = first_place_.size() - 1;
  std::vector<double> sums(tensors * norms);
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t at = first_place_[t]; at < first_place_[t + 1]; ++at) {
      const Place place = places_[at];
      const size_t runs = this->runs(place.shard);
      for (size_t k = 0; k < norms; ++k) sums[t * norms + k] += of[place.shard].runs[k * runs + place.run];
    }
  }
  for (const ShardSquares& shard : of) {
    for (const auto& [tensor, totals] : shard.totals)
      std::copy_n(totals.begin(), norms, sums.begin() + static_cast<ptrdiff_t>(tensor * norms));
  }
  return sums;
}

v1::NormSums NormSums::Encode(uint32_t shard, const ShardSquares& squares, size_t norms) const {
  v1::NormSums message;
  for (size_t k = 0; k < norms; ++k) {
    ForEachRunOf(layout_, shard, [&](const Run& run, size_t number) {
      if (!squares.totals.contains(run.tensor)) message.add_runs(squares.runs[k * runs(shard) + number]);
    });
    for (const auto& [tensor, totals] : squares.totals) message.add_totals(totals[k]);
  }
  for (const auto& [tensor, totals] : squares.totals) message.add_totalled(tensor);
  message.set_fate(squares.fate);
  return message;
}

absl::StatusOr<ShardSquares> NormSums::Decode(uint32_t shard, const v1::NormSums& message, size_t norms) const {
  ShardSquares squares;
  for (const uint32_t tensor : message.totalled()) {
    if (!squares.totals.empty() && tensor <= squares.totals.rbegin()->first) {
      return absl::InvalidArgumentError(absl::StrFormat("totals of tensor %d come behind those of tensor %d", tensor,
                                                        squares.totals.rbegin()->first));
    }
    squares.totals.emplace_hint(squares.totals.end(), tensor, std::vector<double>(norms));
  }
  size_t expected = 0;
  std::map<uint32_t, bool> known;  // by tensor that is totalled: it lies on the shard
  ForEachRunOf(layout_, shard, [&](const Run& run, size_t) {
    if (squares.totals.contains(run.tensor)) {
      known[run.tensor] = true;
    } else {
      ++expected;
    }
  });
  if (known.size() != squares.totals.size() ||
      static_cast<size_t>(message.totals_size()) != norms * squares.totals.size() ||
      static_cast<size_t>(message.runs_size()) != norms * expected) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shard %d tells %d sums of runs and %d of tensors, of %d tensors (%d of them its own); expected %d norms of %d "
        "runs",
        shard, message.runs_size(), message.totals_size(), squares.totals.size(), known.size(), norms, expected));
  }
  const auto is_negative = [](double square) { return square < 0; };
  if (std::any_of(message.runs().begin(), message.runs().end(), is_negative) ||
      std::any_of(message.totals().begin(), message.totals().end(), is_negative)) {
    return absl::InvalidArgumentError(absl::StrFormat("shard %d tells a sum of squares below 0", shard));
  }
  if (!v1::RoundFate_IsValid(message.fate())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shard %d tells a fate %d of the round, which is none", shard, message.fate()));
  }
  squares.fate = message.fate();
  squares.runs.resize(norms * runs(shard));
  auto next = message.runs().begin();
  auto total = message.totals().begin();
  for (size_t k = 0; k < norms; ++k) {
    ForEachRunOf(layout_, shard, [&](const Run& run, size_t number) {
      if (!squares.totals.contains(run.tensor)) squares.runs[k * runs(shard) + number] = *next++;
    });
    for (auto& [tensor, totals] : squares.totals) totals[k] = *total++;
  }
  return squares;
}

uint64_t NormSums::MaxMessageBytes(size_t norms) const {
  uint64_t most = 0;
  for (uint32_t s = 0; s < layout_.shard_count(); ++s) most = std::max<uint64_t>(most, runs(s));
  return most * (8 * norms + kTensorBytes) + kMessageOverheadBytes;
}

}  // namespace gradwire
