// See segments.h.
#include "common/journal/segments.h"

#include <algorithm>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire::journal {
namespace {

constexpr std::string_view kSuffix = ".journal";
constexpr size_t kDigits = 20;

}  // namespace

std::string SegmentPath(const std::string& directory, uint64_t sequence) {
  return absl::StrFormat("%s/%020d%s", directory, sequence, std::string(kSuffix));
}

absl::StatusOr<std::vector<uint64_t>> ListSegments(Disk& disk, const std::string& directory) {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk.List(directory));
  std::vector<uint64_t> sequences;
  for (const std::string& name : names) {
    uint64_t sequence = 0;
    if (name.size() != kDigits + kSuffix.size() || !name.ends_with(kSuffix)) continue;
    if (absl::SimpleAtoi(name.substr(0, kDigits), &sequence)) sequences.push_back(sequence);
  }
  std::sort(sequences.begin(), sequences.end());
  return sequences;
}

}  // namespace gradwire::journal
