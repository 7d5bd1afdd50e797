// See initialization.h.
#include "server/rounds/initialization.h"

#include "absl/strings/str_format.h"

namespace gradwire {

bool Initialization::Elect(const Membership& membership) {
  if (done_) return false;
  const Member* chosen = initializer_ ? membership.Get(*initializer_) : nullptr;
  if (chosen != nullptr && chosen->may_initialize) return false;
  // A mixture of two workers' initial parameters would be nobody's: start over.
  const bool restart = uploaded_count_ > 0;
  uploaded_.assign(uploaded_.size(), false);
  uploaded_count_ = 0;
  const Member* first = membership.FirstInitializer();
  initializer_ = first == nullptr ? std::nullopt : std::optional<MemberId>(first->id);
  return restart;
}

absl::Status Initialization::Check(const Membership& membership, MemberId id, uint32_t bucket) const {
  const Member* member = membership.Get(id);
  if (member == nullptr) return absl::NotFoundError("not a member of this job: join again");
  if (!needed_) {
    return absl::FailedPreconditionError(
        "this job keeps no parameters (OPTIMIZER_NONE): there is nothing to initialize");
  }
  if (done_) return absl::AlreadyExistsError("the parameters of this job are initialized: pull them");
  if (initializer_ != id) {
    const Member* chosen = initializer_ ? membership.Get(*initializer_) : nullptr;
    if (chosen == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrFormat("no worker is chosen yet to send the initial parameters; '%s' did not say that it may "
                          "(JoinRequest.may_initialize): pull them",
                          member->worker));
    }
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker '%s' was chosen to send the initial parameters, not '%s': pull them", chosen->worker, member->worker));
  }
  if (bucket >= uploaded_.size()) return absl::InvalidArgumentError(absl::StrFormat("no bucket %d", bucket));
  if (uploaded_[bucket]) return absl::AlreadyExistsError(absl::StrFormat("bucket %d is initialized", bucket));
  return absl::OkStatus();
}

void Initialization::Uploaded(uint32_t bucket) {
  uploaded_[bucket] = true;
  if (++uploaded_count_ == uploaded_.size()) done_ = true;
}

}  // namespace gradwire
