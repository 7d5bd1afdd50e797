// The parts of a small job in host memory, for tests of its rooms one by one.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "server/desk/desk.h"
#include "server/flow/push_stream.h"
#include "server/job/by_rounds.h"
#include "server/job/job_log.h"
#include "server/job/job_parts.h"
#include "server/job/make_job.h"
#include "server/snapshot/snapshots.h"
#include "server/stages/apply.h"
#include "server/stages/stage.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"

namespace gradwire::testing_support {

// A worker as its job sees it: a member with a stream.
struct TestMember {
  MemberId id = 0;
  std::shared_ptr<RecordingStream> received = std::make_shared<RecordingStream>();
  std::shared_ptr<Outbox> out = std::make_shared<Outbox>(received);
  PushStream stream;
};

// Its next one.
inline PushStream LaterStreamOf(const TestMember& member) {
  PushStream later;
  later.member = member.stream.member;
  later.incarnation = member.stream.incarnation;
  later.worker = member.stream.worker;
  later.out = member.stream.out;
  return later;
}

// What the rounds decided is kept in `decided` and carried out by nobody.
class TestJob {
 public:
  explicit TestJob(const v1::JobSpec& spec);

  JobParts& parts() { return *parts_; }
  const ByRounds& by_rounds() const { return by_rounds_; }
  BucketState& bucket(uint32_t b) { return *parts_->buckets[b]; }
  FrameMaker& frames() { return frames_; }
  ManualClock& clock() { return clock_; }

  std::unique_ptr<TestMember> Join(const std::string& worker, uint64_t incarnation = 1);
  // All buckets have parameters, all elements `value`.
  void Initialize(const TestMember& member, float value);
  // Merges the member's frame of a round, all elements `value`. What closes with it is in `decided`.
  void Merge(TestMember& member, uint32_t bucket, uint64_t round, float value);
  // What is in `decided`, the first of it: of this bucket.
  ClosedBucket Closed(uint32_t b);

  RoundActions decided;

 private:
  const std::unique_ptr<kernels::Backend> backend_ = std::move(*kernels::MakeBackend("cpu"));
  ManualClock clock_;
  FrameMaker frames_;
  std::unique_ptr<JobParts> parts_;
  ByRounds by_rounds_;
};

// A last stage that keeps what comes.
class KeepingStage final : public Stage {
 public:
  void Pass(ClosedBucket&& closed) override { passed.push_back(std::move(closed)); }
  std::vector<ClosedBucket> passed;
};

// A job with its desk and its log, wired as in JobShard. What is applied is kept.
class LoggedJob : public TestJob {
 public:
  using TestJob::TestJob;

  Desk desk{&parts(), by_rounds().answers.get()};
  Snapshots snapshots{&parts()};
  JobLog log{&parts(), by_rounds().past.get(), /*waits_for_shards=*/false};
  KeepingStage applied;
  Apply apply{&parts(), by_rounds().flow.get(), by_rounds().past.get(), &snapshots, &desk, &applied};
};

}  // namespace gradwire::testing_support
