// The end of a round: pullers are answered by whichever thread comes last, the one that applied the update, or the
// journal's once the record is safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/desk/desk.h"
#include "server/job/job_parts.h"
#include "server/snapshot/snapshots.h"
#include "server/stages/stage.h"

namespace gradwire {

class Publish final : public Stage {
 public:
  Publish(JobParts* parts, Snapshots* snapshots, Desk* desk) : parts_(*parts), snapshots_(*snapshots), desk_(*desk) {}

  // The version is applied, or the bucket has stopped.
  void Pass(ClosedBucket&& closed) override;
  // The record that makes `version` of a bucket may be seen.
  void NoteSafe(uint32_t bucket, uint64_t version);
  // No bucket of the job goes on after `round`, because of something that concerns them all.
  void StopAll(uint64_t round, const absl::Status& why);

 private:
  JobParts& parts_;
  Snapshots& snapshots_;
  Desk& desk_;
};

}  // namespace gradwire
