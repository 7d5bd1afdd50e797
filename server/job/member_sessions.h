// Which process a worker's incarnation is: two that resume from copies of one checkpoint have the same incarnation, and
// sessions of their own (WorkerIdentity.session).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "server/rounds/membership.h"

namespace gradwire {

// Not thread-safe. Remembers members that are none any more: a process that stood still while another one took its
// place must not go on when that has gone, or what its residual holds would be pushed twice.
class MemberSessions {
 public:
  static constexpr size_t kMostKnown = 4096;   // members, those that came last
  static constexpr size_t kMostReplaced = 64;  // of one member

  // The member is this session, as far as is known.
  bool Is(MemberId member, uint64_t session) const;
  // The member was this session once, and has been another one since.
  bool WasReplaced(MemberId member, uint64_t session) const;
  // From now on the member is this session.
  void Assign(MemberId member, uint64_t session);

 private:
  struct Known {
    uint64_t session = 0;
    std::deque<uint64_t> replaced;
  };
  std::map<MemberId, Known> known_;
  std::deque<MemberId> order_;  // of coming
};

}  // namespace gradwire
