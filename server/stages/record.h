// The update frame goes to the journal and the standbys, which store it while the next stage applies it.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "server/job/job_log.h"
#include "server/stages/stage.h"

namespace gradwire {

// Without a journal this stage only passes the bucket on.
class Record final : public Stage {
 public:
  // `safe`: called when the record that makes `version` of a bucket meets the job's durability, by a thread of the log.
  using Safe = std::function<void(uint32_t bucket, uint64_t version)>;
  Record(JobLog* log, Safe safe, Stage* next) : log_(*log), safe_(std::move(safe)), next_(*next) {}
  void Pass(ClosedBucket&& closed) override;

 private:
  JobLog& log_;
  const Safe safe_;
  Stage& next_;
};

}  // namespace gradwire
