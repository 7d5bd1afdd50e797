// Whether the parameters of a job may be replaced while it trains; proto/ROUNDS.md, "Replaced parameters".
#pragma once

#include "absl/status/status.h"
#include "common/job/job.h"

namespace gradwire {

// Errors: Unimplemented, FailedPrecondition (the job keeps no parameters); each says what to do.
absl::Status CheckReplaceable(const Job& job);

}  // namespace gradwire
