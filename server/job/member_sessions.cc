// See member_sessions.h.
#include "server/job/member_sessions.h"

#include <algorithm>

namespace gradwire {
namespace {

constexpr int kLooksPerJoin = 4;  // at those who may be forgotten: more than one comes

}  // namespace

bool MemberSessions::Is(MemberId member, uint64_t session) const {
  const auto known = known_.find(member);
  return known == known_.end() || known->second.session == session;
}

bool MemberSessions::WasReplaced(MemberId member, uint64_t session) const {
  const auto known = known_.find(member);
  return known != known_.end() && std::ranges::find(known->second.replaced, session) != known->second.replaced.end();
}

void MemberSessions::Joined(MemberId member, uint64_t session, absl::FunctionRef<bool(MemberId)> is_member) {
  if (const auto known = known_.find(member); known != known_.end()) {
    known->second.session = session;
    return;
  }
  order_.push_back(member);
  known_[member].session = session;
  for (int look = 0; look < kLooksPerJoin && order_.size() > kMostKnown; ++look) {
    const MemberId first = order_.front();
    order_.pop_front();
    if (is_member(first)) {
      order_.push_back(first);
    } else {
      known_.erase(first);
    }
  }
}

void MemberSessions::Attached(uint64_t session) {
  if (session == 0) return;  // it cannot be told from others
  for (auto& [member, known] : known_) {
    if (known.session != session || known.holder == session) continue;
    if (known.holder != 0) known.replaced.push_back(known.holder);
    if (known.replaced.size() > kMostReplaced) known.replaced.erase(known.replaced.begin());
    known.holder = session;
  }
}

}  // namespace gradwire
