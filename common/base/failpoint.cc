// See failpoint.h.
#include "common/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gradwire::failpoint {
namespace {

constinit std::atomic<uint64_t> hits_left{0};

}  // namespace

absl::Status Arm(std::string_view spec) {
  if (spec.empty()) return absl::OkStatus();
  const size_t colon = spec.find(':');
  const std::string name(spec.substr(0, colon));
  uint64_t hits = 1;
  if (colon != std::string_view::npos && (!absl::SimpleAtoi(std::string(spec.substr(colon + 1)), &hits) || hits == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(kVariable, "=", std::string(spec), ": what follows the colon must be a number from 1 on"));
  }
  const auto* it = std::find(std::begin(kNames), std::end(kNames), name);
  if (it == std::end(kNames)) {
    std::vector<std::string> names(std::begin(kNames), std::end(kNames));
    return absl::InvalidArgumentError(
        absl::StrCat(kVariable, ": there is no failpoint '", name, "'; there are ", absl::StrJoin(names, ", ")));
  }
  hits_left = hits;
  armed = static_cast<uint32_t>(it - std::begin(kNames));
  return absl::OkStatus();
}

bool Hit() { return hits_left.fetch_sub(1) == 1; }

void Die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();  // the signal is on its way
}

}  // namespace gradwire::failpoint
