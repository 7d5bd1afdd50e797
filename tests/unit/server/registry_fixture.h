// A registry of small jobs over a disk that fails when the test says so, without threads of its own.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/storage/data_directory.h"
#include "kernels/backend.h"
#include "server/job/job_registry.h"
#include "server/journal/journal.h"
#include "tests/lib/fake_disk.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/small_environment.h"

namespace gradwire::testing_support {

class RegistryTest : public testing::Test {
 protected:
  static constexpr TimeNs kSecond = 1'000'000'000;

  // A worker that is connected.
  struct Connected {
    std::shared_ptr<JobShard> job;
    v1::WorkerIdentity identity;
    MemberId member = 0;
    std::shared_ptr<RecordingStream> stream = std::make_shared<RecordingStream>();
    std::shared_ptr<Outbox> out = std::make_shared<Outbox>(stream);
  };

  RegistryTest() {
    EXPECT_TRUE(disk_.CreateDirectory("/").ok());
    data_ = std::move(*DataDirectory::Open(&disk_, "/data"));
    Start({.memory_bytes = 1 << 28, .max_jobs = 16});
  }
  // The server is started anew; with `recover`, from what is stored.
  void Start(const JobRegistry::Limits& limits, bool recover = false) {
    registry_.reset();
    JobEnvironment environment = SmallEnvironment(backend_.get(), &clock_);
    environment.tellers = nullptr;
    environment.adopt_journal = [this](std::unique_ptr<journal::Journal>) -> std::unique_ptr<UpdateSink> {
      if (on_journal_) on_journal_();
      return std::make_unique<HoldingSink>();
    };
    registry_ = std::make_unique<JobRegistry>(environment, limits, data_.get());
    registry_->SetOnChange([this] { ++changes_; });
    if (!recover) return;
    EXPECT_EQ(registry_->Recover(/*following=*/false), absl::OkStatus());
  }

  static v1::JobSpec Spec(const std::string& name, bool durable = false) {
    v1::JobSpec spec = SmallSpec(name, 1, "dense:values=fp32", /*lease_ms=*/3'600'000);
    if (durable) spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
    return spec;
  }
  absl::StatusOr<std::shared_ptr<JobShard>> Create(const v1::JobSpec& spec) {
    return registry_->GetOrCreate(spec, 0, 1, 0);
  }
  Connected Connect(const std::string& job, const std::string& name, uint64_t incarnation = 1) {
    Connected worker;
    worker.job = *registry_->Find(job);
    worker.identity = IdentityOf(job, name, incarnation);
    EXPECT_TRUE(worker.job->Join(worker.identity, 0, true).ok());
    worker.member = *worker.job->Attach(worker.identity, worker.out);
    return worker;
  }
  static void Leave(const Connected& worker) {
    v1::LeaveRequest leave;
    *leave.mutable_identity() = worker.identity;
    EXPECT_EQ(worker.job->Leave(leave), absl::OkStatus());
  }
  // All parameters of the job.
  static void Initialize(const Connected& worker, const v1::JobSpec& spec) {
    FrameMaker frames(spec, 0, 1, worker.identity.incarnation());
    PushStream stream;
    stream.member = worker.member;
    stream.incarnation = worker.identity.incarnation();
    stream.out = worker.out;
    for (uint32_t b = 0; b < frames.buckets(); ++b) {
      const Bytes chunk = frames.Initialize(b, 1.0f)[0];
      EXPECT_TRUE(worker.job->intake().Take(stream, {&chunk, 1}).ok());
    }
    EXPECT_TRUE(worker.job->HasParameters());
  }
  // What is in the directory of the jobs.
  std::vector<std::string> Stored() { return *disk_.List("/data/jobs"); }

  const std::unique_ptr<kernels::Backend> backend_ = std::move(*kernels::MakeBackend("cpu"));
  ManualClock clock_;
  FakeDisk disk_;
  std::unique_ptr<DataDirectory> data_;
  std::function<void()> on_journal_;  // called when a durable job gets its journal
  int changes_ = 0;
  std::unique_ptr<JobRegistry> registry_;
};

}  // namespace gradwire::testing_support
