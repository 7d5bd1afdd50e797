// Field-by-field comparison by protobuf reflection; see spec_difference.h.
#include "server/job/spec_difference.h"

#include <google/protobuf/util/message_differencer.h>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace gradwire {

std::string DescribeDifference(const v1::JobSpec& here, const v1::JobSpec& asked) {
  if (here.tensors_size() != asked.tensors_size()) {
    return absl::StrFormat("tensors: %d here, %d asked for", here.tensors_size(), asked.tensors_size());
  }
  std::string report;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&report);
  if (differencer.Compare(here, asked)) return "nothing";
  // A line reads "modified: path: old -> new", "added: path: new" or "deleted: path: old".
  const std::vector<std::string> lines = absl::StrSplit(report, '\n', absl::SkipEmpty());
  if (lines.empty()) return "a field that cannot be named";
  const std::pair<std::string, std::string> action = absl::StrSplit(lines[0], absl::MaxSplits(": ", 1));
  const std::pair<std::string, std::string> change = absl::StrSplit(action.second, absl::MaxSplits(": ", 1));
  if (action.first == "modified") {
    const std::pair<std::string, std::string> values = absl::StrSplit(change.second, absl::MaxSplits(" -> ", 1));
    return absl::StrFormat("%s is %s here, %s asked for", change.first, values.first, values.second);
  }
  if (action.first == "added") return absl::StrFormat("%s is unset here, %s asked for", change.first, change.second);
  return absl::StrFormat("%s is %s here, unset in what was asked for", change.first, change.second);
}

}  // namespace gradwire
