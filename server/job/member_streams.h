// The streams that a job's workers have open on this server, and those of workers that went away and may still read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "server/desk/outbox.h"
#include "server/desk/unsent_budget.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Not thread-safe. Ends no stream: only a caller without a lock may do that.
class MemberStreams {
 public:
  using Streams = std::vector<std::shared_ptr<Outbox>>;

  // Streams that a member may have: one for pushes, one for pulls, and those that broke and have not ended yet.
  static constexpr size_t kMaxPerMember = 16;
  static constexpr size_t kMaxDeparted = 64;

  // What one member may leave unread on all its streams.
  explicit MemberStreams(uint64_t unsent_limit_bytes) : unsent_limit_bytes_(unsent_limit_bytes) {}

  bool Has(MemberId member) const { return open_.contains(member); }
  size_t CountOf(MemberId member) const { return open_.count(member); }
  // The member has fewer than kMaxPerMember.
  void Attach(MemberId member, std::shared_ptr<Outbox> out);
  void Detach(MemberId member, const std::shared_ptr<Outbox>& out);
  // Returns all streams of a member that has left. At most kMaxDeparted streams outlive their members; *unread: those
  // beyond, which the caller cancels.
  Streams Depart(MemberId member, Streams* unread);
  // What the member left unread does not count for the next one with its name.
  void Forget(MemberId member) { unsent_.erase(member); }
  // The job is gone.
  Streams TakeAll();

 private:
  const uint64_t unsent_limit_bytes_;
  std::multimap<MemberId, std::shared_ptr<Outbox>> open_;
  std::map<MemberId, std::shared_ptr<UnsentBudget>> unsent_;  // of all streams of a member
  std::deque<std::weak_ptr<Outbox>> departed_;                // the oldest first
};

}  // namespace gradwire
