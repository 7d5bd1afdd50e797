// The parts of a small job in host memory, for tests of its rooms one by one.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "server/flow/push_stream.h"
#include "server/job/job_parts.h"
#include "server/job/by_rounds.h"
#include "server/job/make_job.h"
#include "server/job/update_sink.h"
#include "server/stages/stage.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"

namespace gradwire::testing_support {

// What a small job needs.
JobEnvironment SmallEnvironment(kernels::Backend* backend, Clock* clock);

// A worker as its job sees it: a member with a stream.
struct TestMember {
  MemberId id = 0;
  std::shared_ptr<RecordingStream> received = std::make_shared<RecordingStream>();
  std::shared_ptr<Outbox> out = std::make_shared<Outbox>(received);
  PushStream stream;
};

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
  void Pass(ClosedBucket closed) override { passed.push_back(std::move(closed)); }
  std::vector<ClosedBucket> passed;
};

// A sink whose records become safe when the test says so.
class HoldingSink final : public UpdateSink {
 public:
  void Append(journal::Record record, std::function<void()> visible) override {
    records.push_back(std::move(record));
    waiting.push_back(std::move(visible));
  }
  void Stop() override { stopped = true; }
  journal::JournalStatus status() const override { return state; }
  void SnapshotTaken(uint64_t version, uint64_t keep_from) override {
    snapshot = version;
    kept_from = keep_from;
    records_before_cut = records.size();
  }

  journal::JournalStatus state;  // what it says of itself
  std::vector<journal::Record> records;
  std::vector<std::function<void()>> waiting;
  uint64_t snapshot = 0;
  uint64_t kept_from = 0;
  size_t records_before_cut = 0;  // that were there when the last snapshot was taken
  bool stopped = false;
};

}  // namespace gradwire::testing_support
