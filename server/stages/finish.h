// The first stage: the frames of a bucket that has closed become its update frame.
#pragma once

#include "server/flow/flow.h"
#include "server/job/job_log.h"
#include "server/job/job_parts.h"
#include "server/stages/stage.h"

namespace gradwire {

class Finish final : public Stage {
 public:
  Finish(JobParts* parts, Flow* flow, JobLog* log, Stage* next)
      : parts_(*parts), flow_(*flow), log_(*log), next_(*next) {}
  // Where memory runs out the round is closed all the same: the bucket stops and its pullers are told.
  void Pass(ClosedBucket&& closed) override;

 private:
  std::vector<journal::Contribution> WhoTookPart(const RoundActions::Close& close) const;

  JobParts& parts_;
  Flow& flow_;
  JobLog& log_;
  Stage& next_;
};

}  // namespace gradwire
