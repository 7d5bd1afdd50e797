// Which process a worker's incarnation is: two that resume from copies of one checkpoint have the same incarnation, and
// sessions of their own (WorkerIdentity.session).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Not thread-safe. Remembers members that are none any more: a process that stood still while another one took its
// place must not go on when that has gone, or what its residual holds would be pushed twice.
class MemberSessions {
 public:
  static constexpr size_t kMostKnown = 1024;   // of those that are no members any more
  static constexpr size_t kMostReplaced = 16;  // of one member

  // The session was the last one that joined as this member, as far as is known.
  bool Is(MemberId member, uint64_t session) const;
  // The session had streams as this member once, and another one has had some since.
  bool WasReplaced(MemberId member, uint64_t session) const;
  // The session joined. `is_member`: who is remembered in any case.
  void Joined(MemberId member, uint64_t session, absl::FunctionRef<bool(MemberId)> is_member);
  // The session has a stream. Until then it has taken nobody's place, and may give up; now it has, of every member that
  // it was the last to join as: one that came too late to go on as the incarnation of its checkpoint goes on as a new
  // one, with the residual of the checkpoint.
  void Attached(uint64_t session);

 private:
  struct Known {
    uint64_t session = 0;
    uint64_t holder = 0;  // of streams, the last one that told a number; 0: none
    std::vector<uint64_t> replaced;
  };
  std::map<MemberId, Known> known_;
  std::deque<MemberId> order_;  // in which they are forgotten
};

}  // namespace gradwire
