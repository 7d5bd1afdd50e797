// The plan by which the update frame in a record was encoded.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "common/codec/plan/plan_window.h"
#include "common/job/round_mode.h"
#include "common/journal/record.h"

namespace gradwire {

// `plans`: those of the bucket before the update. DataLoss: it is not among them, or the record does not say which it
// is.
inline absl::StatusOr<const RoundPlan*> PlanOfRecord(const journal::Record& record, const Job& job,
                                                     const PlanWindow& plans) {
  uint64_t version = PlanVersion(job, record.round);
  if (IsAsync(job)) {
    if (record.contributions.size() != 1) {
      return absl::DataLossError(
          absl::StrFormat("bucket %d: the update of round %d is that of %d frames; with asynchronous rounds it is that "
                          "of one",
                          record.bucket, record.round, record.contributions.size()));
    }
    version = record.contributions[0].round;
  }
  if (const RoundPlan* plan = plans.Find(version)) return plan;
  return absl::DataLossError(
      absl::StrFormat("bucket %d: the update of round %d was encoded by the plan of version %d, "
                      "which is not kept any more (up to version %d)",
                      record.bucket, record.round, version, plans.version()));
}

}  // namespace gradwire
