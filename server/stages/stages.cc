// See stages.h.
#include "server/stages/stages.h"

#include <algorithm>

namespace gradwire {
namespace {

bool HasUpdateCodec(const Job& job) {
  return std::any_of(job.update_codecs().begin(), job.update_codecs().end(),
                     [](const auto& codec) { return codec.has_value(); });
}

}  // namespace

Stages::Stages(JobParts* parts, Flow* flow, PastRounds* past, Snapshots* snapshots, JobLog* log, Desk* desk)
    : trace_(&parts->trace),
      publish_(parts, snapshots, desk),
      apply_(parts, flow, past, snapshots, desk, Trace(v1::TRACE_APPLY, &publish_)),
      record_(
          log, [this](uint32_t bucket, uint64_t version) { publish_.NoteSafe(bucket, version); },
          Trace(v1::TRACE_RECORD, &apply_)) {
  Stage* next = &record_;
  if (Agreement::IsNeededBy(parts->job)) {
    const auto stop = [this](uint64_t round, const absl::Status& why) { publish_.StopAll(round, why); };
    agreement_ = std::make_unique<Agreement>(parts, stop, Trace(v1::TRACE_AGREEMENT, next));
    next = agreement_.get();
  }
  if (HasUpdateCodec(parts->job)) {
    two_way_ = std::make_unique<TwoWay>(Trace(v1::TRACE_TWO_WAY, next));
    next = two_way_.get();
  }
  finish_ = std::make_unique<Finish>(parts, flow, log, Trace(v1::TRACE_FINISH, next));
  first_ = finish_.get();
  if (agreement_ != nullptr) {
    turn_ = std::make_unique<Turn>(Trace(v1::TRACE_TURN, first_));
    first_ = turn_.get();
  }
  first_ = Trace(v1::TRACE_UNSPECIFIED, first_);
}

Stage* Stages::Trace(v1::TraceStage before, Stage* next) {
  return traced_.emplace_back(std::make_unique<Traced>(trace_, before, next)).get();
}

absl::Status Stages::Start() { return agreement_ == nullptr ? absl::OkStatus() : agreement_->Start(turn_.get()); }

void Stages::Stop() {
  if (agreement_ != nullptr) agreement_->Stop();
}

}  // namespace gradwire
