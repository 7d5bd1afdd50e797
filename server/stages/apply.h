// The optimizer makes a bucket's next version from an update frame: in a round, in recovery and on a standby alike.
#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "common/journal/record.h"
#include "server/desk/desk.h"
#include "server/flow/flow.h"
#include "server/job/job_parts.h"
#include "server/job/past_rounds.h"
#include "server/snapshot/snapshots.h"
#include "server/stages/stage.h"

namespace gradwire {

class Apply final : public Stage {
 public:
  Apply(JobParts* parts, Flow* flow, PastRounds* past, Snapshots* snapshots, Desk* desk, Stage* next)
      : parts_(*parts), flow_(*flow), past_(*past), snapshots_(*snapshots), desk_(*desk), next_(*next) {}

  // The bucket stops where there is no update, or none that can be applied. Answers to those who wait for the version
  // are taken under the same hold of the mutex, before a later version can take its place.
  void Pass(ClosedBucket&& closed) override;

  // `plan`: the one of the bucket's plans by which the update is encoded. Errors: those of ParameterStore::Apply.
  absl::Status ApplyTo(BucketState& bucket, const UpdateFrame& update, const RoundPlan& plan,
                       std::vector<journal::Contribution> who) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  JobParts& parts_;
  Flow& flow_;
  PastRounds& past_;
  Snapshots& snapshots_;
  Desk& desk_;
  Stage& next_;
};

}  // namespace gradwire
