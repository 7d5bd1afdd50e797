// Who sends the initial parameters of a job on one shard, and what of them is here. Pure, like the rounds it serves.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Of the members that may, the one that joined first is chosen; where it is lost before all is here, another one starts
// over.
class Initialization {
 public:
  // `needed`: false where the job keeps no parameters.
  Initialization(uint32_t buckets, bool needed) : needed_(needed), done_(!needed), uploaded_(buckets) {}

  // Chooses again where nobody is chosen, or who was may not any more. True: what had been uploaded is to be dropped.
  bool Elect(const Membership& membership);
  // Ok: `id` may upload `bucket`. AlreadyExists: it is complete. FailedPrecondition: another worker was chosen (named).
  absl::Status Check(const Membership& membership, MemberId id, uint32_t bucket) const;
  // `bucket`, for which Check was ok, is complete.
  void Uploaded(uint32_t bucket);
  // The parameters come from elsewhere.
  void Finish() { done_ = true; }

  bool done() const { return done_; }
  bool Chosen(MemberId id) const { return !done_ && initializer_ == id; }

 private:
  const bool needed_;
  bool done_;
  std::optional<MemberId> initializer_;
  std::vector<bool> uploaded_;
  uint32_t uploaded_count_ = 0;
};

}  // namespace gradwire
