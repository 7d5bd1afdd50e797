// See finish.h.
#include "server/stages/finish.h"

#include <utility>

#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {

void Finish::Pass(ClosedBucket&& closed) {
  GW_FAILPOINT("round.before_close");
  closed.status = CatchBadAlloc("merging", [&]() -> absl::Status {
    GW_RETURN_IF_ERROR(flow_.Finish(&closed));
    if (log_.journals()) closed.who = WhoTookPart(closed.close);
    return absl::OkStatus();
  });
  next_.Pass(std::move(closed));
}

std::vector<journal::Contribution> Finish::WhoTookPart(const RoundActions::Close& close) const {
  std::vector<journal::Contribution> who;
  absl::MutexLock lock(&parts_.mu);
  for (const auto& [id, contribution] : close.contributions) {
    const Member* member = parts_.rounds->membership().Get(id);
    // An abstention of who has left says nothing; there may have been any number of them, and a record has bounds.
    if (member == nullptr && !contribution.included) continue;
    who.push_back({id, member == nullptr ? "" : member->worker, member == nullptr ? 0 : member->incarnation,
                   contribution.digest, contribution.included, contribution.round});
  }
  return who;
}

}  // namespace gradwire
