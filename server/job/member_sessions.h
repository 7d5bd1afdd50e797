// Which process acts as a worker's incarnation: two processes that resume from copies of one checkpoint have the same
// incarnation, and sessions of their own (WorkerIdentity.session).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Not thread-safe. Remembers members that have left, too: a process that stood still while another one took its place
// must not go on when the other has gone, or what its residual holds would be pushed twice.
class MemberSessions {
 public:
  static constexpr size_t kMostKnown = 1024;   // of members that have left
  static constexpr size_t kMostReplaced = 16;  // of one member

  // Whether the session was the last one that joined as this member, as far as is known.
  bool Is(MemberId member, uint64_t session) const;
  // Whether the session had streams as this member once, and another session has had some since.
  bool WasReplaced(MemberId member, uint64_t session) const;
  // The session joined. `is_member`: who is remembered in any case.
  void Joined(MemberId member, uint64_t session, absl::FunctionRef<bool(MemberId)> is_member);
  // The session has a stream. Before that it has taken nobody's place, and may give up. Now it has taken the place of
  // every member that it was the last to join as: a session that came too late to go on as the incarnation of its
  // checkpoint then joins as a new one, with the residual of the checkpoint.
  void Attached(uint64_t session);

 private:
  struct Known {
    uint64_t session = 0;
    uint64_t holder = 0;  // the last session that had streams and told its number; 0: none
    std::vector<uint64_t> replaced;
  };
  std::map<MemberId, Known> known_;
  std::deque<MemberId> order_;  // the first is forgotten first
};

}  // namespace gradwire
