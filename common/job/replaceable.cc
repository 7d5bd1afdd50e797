#include "common/job/replaceable.h"

#include "absl/strings/str_format.h"
#include "common/job/round_mode.h"

namespace gradwire {

absl::Status CheckReplaceable(const Job& job) {
  const auto unimplemented = [&job](const char* why) {
    return absl::UnimplementedError(
        absl::StrFormat("job '%s': parameters cannot be replaced while it trains: %s; end this job and begin one of "
                        "another name with the new parameters",
                        job.spec().name(), why));
  };
  if (!job.keeps_parameters()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "job '%s' keeps no parameters (optimizer none) that could be replaced: each worker has its own",
        job.spec().name()));
  }
  if (IsAsync(job)) return unimplemented("its rounds are asynchronous");
  if (job.spec().rounds().staleness() > 0) return unimplemented("its rounds have bounded staleness");
  if (job.spec().rounds().quorum() > 0) return unimplemented("its rounds go on without workers that are late (quorum)");
  if (job.two_phase()) return unimplemented("codec powersgd takes two rounds for a step");
  return absl::OkStatus();
}

}  // namespace gradwire
