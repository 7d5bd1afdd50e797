// Who takes part in a job on this shard: names, incarnations and leases. A pure state machine: it is told what happens
// and what time it is, does no I/O, reads no clock and takes no locks (its owner serialises calls).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"

namespace gradwire {

// A worker's incarnation as a number: the same (worker, incarnation) has the same id, also after it was away.
using MemberId = uint64_t;
MemberId MakeMemberId(std::string_view worker, uint64_t incarnation);

struct Member {
  MemberId id = 0;
  std::string worker;
  uint64_t incarnation = 0;
  uint64_t start_round = 0;  // contributes from this round on; kNever: it is behind and was not told where to start
  uint64_t sequence = 0;     // order of joining
  TimeNs lease_end = 0;
  bool may_initialize = false;  // as its latest join or heartbeat said
  uint64_t heard_round = 0;     // the latest round of which a frame came
  TimeNs held_up = 0;           // for how long it alone was awaited
  TimeNs joined = 0;
};

class Membership {
 public:
  struct Rules {
    uint32_t max_workers = 0;
    TimeNs lease_ns = 0;
  };
  struct Joined {
    MemberId id = 0;
    bool again = false;                  // this incarnation was a member already: its lease was renewed
    std::optional<MemberId> superseded;  // the older incarnation that this one expelled
  };

  explicit Membership(const Rules& rules) : rules_(rules) {}

  // InvalidArgument: no name, no incarnation (0), or the id of a member of another name.
  absl::Status CheckIdentity(std::string_view worker, uint64_t incarnation) const;
  // A worker joins, to contribute from `start_round` on. Another incarnation of the same name is expelled at once.
  // Errors: those of CheckIdentity, ResourceExhausted (max_workers; names both numbers).
  absl::StatusOr<Joined> Join(std::string_view worker, uint64_t incarnation, uint64_t start_round, TimeNs now);
  static constexpr uint64_t kNever = UINT64_MAX;
  // Postpones the first round of a member; earlier rounds do not wait for it.
  void Postpone(MemberId id, uint64_t start_round);
  // The member contributes from `round` on, if not from an earlier one already.
  void Advance(MemberId id, uint64_t round);
  void NoteFrame(MemberId id, uint64_t round);
  void NoteHeldUp(MemberId id, TimeNs time);
  // Errors: NotFound (never joined, left, or the lease ended), FailedPrecondition (superseded); both say to join again.
  absl::StatusOr<MemberId> Find(std::string_view worker, uint64_t incarnation) const;
  // FailedPrecondition: another incarnation took its place. Ok also where it is no member. Errors of CheckIdentity too.
  absl::Status CheckNotSuperseded(std::string_view worker, uint64_t incarnation) const;
  const Member* Get(MemberId id) const;
  void Renew(MemberId id, TimeNs now);
  // All leases last `slept` longer, up to a whole one from `now`: so long nobody's sign of life could have been heard.
  void Excuse(TimeNs slept, TimeNs now);
  void SetMayInitialize(MemberId id, bool may_initialize);
  bool Remove(MemberId id);
  // Removes and returns the members whose lease has ended.
  std::vector<MemberId> Expire(TimeNs now);
  // The earliest end of a lease; nothing when there are no members.
  std::optional<TimeNs> NextExpiry() const;

  const std::map<MemberId, Member>& members() const { return members_; }
  // Of the members that may initialize, the one that joined first.
  const Member* FirstInitializer() const;
  const Rules& rules() const { return rules_; }

 private:
  const Rules rules_;
  std::map<MemberId, Member> members_;
  std::map<std::string, MemberId, std::less<>> by_name_;
  uint64_t next_sequence_ = 0;
};

}  // namespace gradwire
