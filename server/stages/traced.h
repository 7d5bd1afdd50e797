// Between two stages of a job: notes how long the one before had a bucket, in rounds that are traced.
#pragma once

#include <utility>

#include "common/trace/recorder.h"
#include "gradwire/v1/trace.pb.h"
#include "server/stages/stage.h"

namespace gradwire {

class Traced final : public Stage {
 public:
  // `before`: the stage that passes buckets to this one; unspecified: this is the first.
  Traced(TraceRecorder* trace, v1::TraceStage before, Stage* next) : trace_(*trace), before_(before), next_(*next) {}

  void Pass(ClosedBucket&& closed) override {
    if (trace_.Wants(closed.close.round)) {
      const TimeNs now = trace_.Now();
      if (closed.since != 0 && before_ != v1::TRACE_UNSPECIFIED) {
        trace_.Note({.stage = before_, .round = closed.close.round, .bucket = closed.close.bucket}, closed.since, now);
      }
      closed.since = now;
    }
    next_.Pass(std::move(closed));
  }

 private:
  TraceRecorder& trace_;
  const v1::TraceStage before_;
  Stage& next_;
};

}  // namespace gradwire
