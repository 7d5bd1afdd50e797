// The stages of one job, put together once.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/stages/agreement.h"
#include "server/stages/apply.h"
#include "server/stages/finish.h"
#include "server/stages/publish.h"
#include "server/stages/record.h"
#include "server/stages/traced.h"
#include "server/stages/turn.h"
#include "server/stages/two_way.h"

namespace gradwire {

// Made from the last stage to the first, each with its next one, before which a Traced stands; a stage that the job
// does not need is left out.
class Stages {
 public:
  Stages(JobParts* parts, Flow* flow, PastRounds* past, Snapshots* snapshots, JobLog* log, Desk* desk);
  // Errors: those of Agreement::Start.
  absl::Status Start();
  // After this no bucket waits for other shards.
  void Stop();

  void Pass(ClosedBucket&& closed) { first_->Pass(std::move(closed)); }
  Apply& apply() { return apply_; }
  Publish& publish() { return publish_; }
  Agreement* agreement() { return agreement_.get(); }  // null: the job's shards have nothing to agree on

 private:
  // A Traced in front of `next`, behind `before`.
  Stage* Trace(v1::TraceStage before, Stage* next);

  TraceRecorder* const trace_;
  std::vector<std::unique_ptr<Traced>> traced_;
  Publish publish_;
  Apply apply_;
  Record record_;
  std::unique_ptr<Agreement> agreement_;
  std::unique_ptr<TwoWay> two_way_;
  std::unique_ptr<Finish> finish_;
  std::unique_ptr<Turn> turn_;
  Stage* first_ = nullptr;
};

}  // namespace gradwire
