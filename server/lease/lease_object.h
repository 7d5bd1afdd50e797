// A Lease of Kubernetes (coordination.k8s.io/v1) as JSON, and what of it says who is primary. All else in it, whoever
// put it there, stays as it is when it is written back.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradwire {

// Annotations with the epoch and the name of the last primary: they stay when the lease ends.
inline constexpr char kEpochAnnotation[] = "gradwire.io/epoch";
inline constexpr char kPrimaryAnnotation[] = "gradwire.io/primary";

class LeaseObject {
 public:
  LeaseObject(const std::string& space, const std::string& name);
  // Errors: DataLoss (not a Lease, or fields that cannot be read; says which).
  static absl::StatusOr<LeaseObject> Parse(std::string_view text);
  std::string Serialize() const;

  const std::string& version() const { return version_; }  // changes with every write, otherwise opaque
  const std::string& holder() const { return holder_; }    // its identity; empty: nobody
  int64_t lives_ms() const { return lives_ms_; }           // 0: not said
  const std::string& last_primary() const { return last_primary_; }
  uint64_t last_epoch() const { return last_epoch_; }

  // `now` is for people: nothing is decided by it.
  void Hold(const std::string& identity, int64_t ttl_ms, absl::Time now);
  void GiveBack(absl::Time now);
  void Announce(uint64_t epoch, const std::string& name);

 private:
  LeaseObject() = default;
  absl::Status Read();

  nlohmann::json json_;
  std::string version_, holder_, last_primary_;
  int64_t lives_ms_ = 0;
  uint64_t last_epoch_ = 0;
};

}  // namespace gradwire
