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
    : publish_(parts, snapshots, desk),
      apply_(parts, flow, past, snapshots, desk, &publish_),
      record_(
          log, [this](uint32_t bucket, uint64_t version) { publish_.NoteSafe(bucket, version); }, &apply_) {
  Stage* next = &record_;
  if (Agreement::IsNeededBy(parts->job)) {
    const auto stop = [this](uint64_t round, const absl::Status& why) { publish_.StopAll(round, why); };
    agreement_ = std::make_unique<Agreement>(parts, stop, next);
    next = agreement_.get();
  }
  if (HasUpdateCodec(parts->job)) {
    two_way_ = std::make_unique<TwoWay>(next);
    next = two_way_.get();
  }
  finish_ = std::make_unique<Finish>(parts, flow, log, next);
  first_ = finish_.get();
  if (agreement_ == nullptr) return;
  turn_ = std::make_unique<Turn>(first_);
  first_ = turn_.get();
}

absl::Status Stages::Start() { return agreement_ == nullptr ? absl::OkStatus() : agreement_->Start(turn_.get()); }

void Stages::Stop() {
  if (agreement_ != nullptr) agreement_->Stop();
}

}  // namespace gradwire
