// See member_sessions.h.
#include "server/job/member_sessions.h"

#include <algorithm>

namespace gradwire {

bool MemberSessions::Is(MemberId member, uint64_t session) const {
  const auto known = known_.find(member);
  return known == known_.end() || known->second.session == session;
}

bool MemberSessions::WasReplaced(MemberId member, uint64_t session) const {
  const auto known = known_.find(member);
  if (known == known_.end() || known->second.session == session) return false;
  return std::ranges::find(known->second.replaced, session) != known->second.replaced.end();
}

void MemberSessions::Assign(MemberId member, uint64_t session) {
  const auto [known, is_new] = known_.try_emplace(member, Known{session, {}});
  if (is_new) {
    order_.push_back(member);
    if (order_.size() <= kMostKnown) return;
    known_.erase(order_.front());
    order_.pop_front();
  } else if (known->second.session != session) {
    std::deque<uint64_t>& replaced = known->second.replaced;
    replaced.push_back(known->second.session);
    if (replaced.size() > kMostReplaced) replaced.pop_front();
    known->second.session = session;
  }
}

}  // namespace gradwire
