// What becomes of a bucket whose round has closed: it passes the stages of its job, which are chosen when the job is
// made, and ends with its pullers.
//
//   flow -> [turn] -> finish -> [two-way] -> [agreement] -> record -> apply -> publish -> desk
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/base/clock.h"
#include "common/codec/codec.h"
#include "common/journal/record.h"
#include "server/desk/delivery.h"
#include "server/job/bucket_state.h"
#include "server/rounds/rounds.h"

namespace gradwire {

// Handed from stage to stage; whoever has it owns it.
struct ClosedBucket {
  BucketState* bucket = nullptr;
  RoundActions::Close close;  // which round, and who is in it
  // From finish on: the update, the version whose plan it is encoded by, and who took part (where there is a journal).
  UpdateFrame update;
  uint64_t plan_version = 0;
  std::vector<journal::Contribution> who;
  bool nonfinite = false;  // a gradient of the round is not finite
  // From apply on: what is due to pullers.
  std::vector<Delivery> answers;
  TimeNs since = 0;  // of a traced round: when the stage before passed it on (Traced)
  // Not ok: there is no update. The bucket passes the remaining stages all the same; it stops and its pullers are told.
  absl::Status status;
};

// A stage has one way in, and one way out to the next stage. Pass is called without a lock held, by any thread: for
// several buckets of a job at once, for one bucket in the order of its rounds. What a stage is given is its own, to
// pass on or to move to where it waits. Throws nothing but std::bad_alloc.
class Stage {
 public:
  virtual ~Stage() = default;
  virtual void Pass(ClosedBucket&& closed) = 0;
};

}  // namespace gradwire
