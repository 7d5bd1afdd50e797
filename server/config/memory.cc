// See memory.h.
#include "server/config/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gradwire {
namespace {

// The limit in a file; "max", what is no number and 0 are none.
uint64_t LimitIn(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  uint64_t limit = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &limit) || limit == 0) return std::numeric_limits<uint64_t>::max();
  return limit;
}

// The least in a group and those around it. A container may see its own group at the top, whatever its path says.
uint64_t LeastOf(const std::string& hierarchy, std::string group, const std::string& file) {
  uint64_t least = LimitIn(absl::StrCat(hierarchy, "/", file));
  while (group.size() > 1) {
    least = std::min(least, LimitIn(absl::StrCat(hierarchy, group, "/", file)));
    group.resize(group.rfind('/'));
  }
  return least;
}

}  // namespace

uint64_t MachineMemoryBytes() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page_bytes > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 1ull << 30;
}

uint64_t UsableMemoryBytes(const std::string& root) {
  uint64_t bytes = MachineMemoryBytes();
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {  // "0::/of/v2", "4:memory:/of/v1"
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::string hierarchy = absl::StrCat(root, "/sys/fs/cgroup");
    if (parts[1].empty()) bytes = std::min(bytes, LeastOf(hierarchy, parts[2], "memory.max"));
    for (const absl::string_view controller : absl::StrSplit(parts[1], ','))
      if (controller == "memory")
        bytes = std::min(bytes, LeastOf(absl::StrCat(hierarchy, "/memory"), parts[2], "memory.limit_in_bytes"));
  }
  return bytes;
}

}  // namespace gradwire
