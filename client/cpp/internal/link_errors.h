// What a failed call or a stream's end says about the connection to a shard.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace gradwire::client {

inline bool Retryable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// NotFound: a lease ended, or a server that was restarted does not know this worker.
inline bool Mendable(const absl::Status& status) { return Retryable(status) || absl::IsNotFound(status); }

// A host that is up said that nothing listens at the address: that server has ended. Silence is no such proof. These
// are the words of the system, which gRPC passes on, and of inproc.
inline bool NobodyListens(const absl::Status& status) {
  return absl::IsUnavailable(status) && (absl::StrContains(status.message(), "onnection refused") ||
                                         absl::StrContains(status.message(), "nobody listens"));
}

// What gRPC says of itself, without a check, also where it was a damaged length or name that it made no sense of.
inline bool MayBeDamage(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnimplemented(status);
}
inline constexpr int kMostDoubts = 3;  // about an answer that may be damage

}  // namespace gradwire::client
