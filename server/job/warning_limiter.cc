// See warning_limiter.h.
#include "server/job/warning_limiter.h"

namespace gradwire {

bool WarningLimiter::Admit(absl::StatusCode kind, TimeNs now) {
  absl::MutexLock lock(&mu_);
  const auto [window, first] = windows_.try_emplace(kind, Window{now + kWindowNs, 0});
  if (!first) ++window->second.counted;
  return first;
}

std::vector<WarningLimiter::Count> WarningLimiter::TakeEnded(TimeNs now) {
  std::vector<Count> ended;
  absl::MutexLock lock(&mu_);
  for (auto it = windows_.begin(); it != windows_.end();) {
    auto& [kind, window] = *it;
    if (window.end > now) {
      ++it;
    } else if (window.counted == 0) {
      it = windows_.erase(it);
    } else {
      ended.push_back({kind, window.counted});
      window = {now + kWindowNs, 0};
      ++it;
    }
  }
  return ended;
}

}  // namespace gradwire
