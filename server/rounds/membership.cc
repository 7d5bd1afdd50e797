// Names, incarnations and leases; see membership.h.
#include "server/rounds/membership.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/hash.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"

namespace gradwire {
MemberId MakeMemberId(std::string_view worker, uint64_t incarnation) {
  return HashCombine(HashString(worker), incarnation);
}

absl::Status Membership::CheckIdentity(std::string_view worker, uint64_t incarnation) const {
  if (!IsName(worker)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("worker name of %d bytes is not 1 to %d of [A-Za-z0-9._-]", worker.size(), kMaxNameBytes));
  }
  if (incarnation == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("worker '%s' has incarnation 0: take a random number", std::string(worker)));
  }
  // By chance this does not happen; whoever looks for such a pair must not take another worker's place.
  const Member* const same = Get(MakeMemberId(worker, incarnation));
  if (same == nullptr || same->worker == worker) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("worker '%s' incarnation %016x has the number of worker '%s' incarnation %016x: take another "
                      "incarnation",
                      std::string(worker), incarnation, same->worker, same->incarnation));
}

absl::StatusOr<Membership::Joined> Membership::Join(std::string_view worker, uint64_t incarnation, uint64_t start_round,
                                                    TimeNs now) {
  GW_RETURN_IF_ERROR(CheckIdentity(worker, incarnation));
  Joined joined;
  joined.id = MakeMemberId(worker, incarnation);
  const auto known = by_name_.find(worker);
  if (known != by_name_.end() && known->second == joined.id) {
    joined.again = true;
    Renew(joined.id, now);
    return joined;
  }
  if (known == by_name_.end() && members_.size() >= rules_.max_workers) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the job has %d workers and max_workers is %d: worker '%s' cannot join; create the job with a "
                        "larger max_workers, or wait for a worker to leave",
                        members_.size(), rules_.max_workers, std::string(worker)));
  }
  if (known != by_name_.end()) {
    joined.superseded = known->second;
    Remove(known->second);
  }
  Member member{joined.id, std::string(worker), incarnation, start_round, next_sequence_++, now + rules_.lease_ns};
  member.joined = now;
  by_name_[member.worker] = member.id;
  members_[member.id] = std::move(member);
  return joined;
}

void Membership::Postpone(MemberId id, uint64_t start_round) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.start_round = std::max(it->second.start_round, start_round);
}

void Membership::Advance(MemberId id, uint64_t round) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.start_round = std::min(it->second.start_round, round);
}

void Membership::NoteFrame(MemberId id, uint64_t round) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.heard_round = std::max(it->second.heard_round, round);
}

void Membership::NoteHeldUp(MemberId id, TimeNs time) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.held_up += time;
}

absl::StatusOr<MemberId> Membership::Find(std::string_view worker, uint64_t incarnation) const {
  const auto it = by_name_.find(worker);
  if (it == by_name_.end()) {
    return absl::NotFoundError(absl::StrFormat(
        "worker '%s' is not a member of this job (it did not join, left, or its lease ended): join again",
        Printable(worker)));
  }
  const MemberId id = MakeMemberId(worker, incarnation);
  if (it->second != id) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker '%s' incarnation %016x was superseded by incarnation %016x of the same name: join again under another "
        "name, or stop one of the two processes",
        std::string(worker), incarnation, Get(it->second)->incarnation));
  }
  return id;
}

absl::Status Membership::CheckNotSuperseded(std::string_view worker, uint64_t incarnation) const {
  GW_RETURN_IF_ERROR(CheckIdentity(worker, incarnation));
  const absl::Status found = Find(worker, incarnation).status();
  return absl::IsNotFound(found) ? absl::OkStatus() : found;
}

const Member* Membership::Get(MemberId id) const {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

void Membership::Renew(MemberId id, TimeNs now) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.lease_end = std::max(it->second.lease_end, now + rules_.lease_ns);
}

void Membership::SetMayInitialize(MemberId id, bool may_initialize) {
  const auto it = members_.find(id);
  if (it != members_.end()) it->second.may_initialize = may_initialize;
}

bool Membership::Remove(MemberId id) {
  const auto it = members_.find(id);
  if (it == members_.end()) return false;
  by_name_.erase(it->second.worker);
  members_.erase(it);
  return true;
}

void Membership::Excuse(TimeNs slept, TimeNs now) {
  for (auto& [id, member] : members_) {
    // Who was heard already, since this process runs again, has a whole lease.
    member.lease_end = std::max(member.lease_end, std::min(member.lease_end + slept, now + rules_.lease_ns));
  }
}

std::vector<MemberId> Membership::Expire(TimeNs now) {
  std::vector<MemberId> expired;
  for (const auto& [id, member] : members_) {
    if (member.lease_end <= now) expired.push_back(id);
  }
  for (MemberId id : expired) Remove(id);
  return expired;
}

std::optional<TimeNs> Membership::NextExpiry() const {
  std::optional<TimeNs> next;
  for (const auto& [id, member] : members_) {
    if (!next || member.lease_end < *next) next = member.lease_end;
  }
  return next;
}

const Member* Membership::FirstInitializer() const {
  const Member* first = nullptr;
  for (const auto& [id, member] : members_) {
    if (!member.may_initialize) continue;
    if (first == nullptr || member.sequence < first->sequence) first = &member;
  }
  return first;
}

}  // namespace gradwire
