// Jobs whose rounds the server's ticker closes, and whose closing takes as long as a test wants.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/daemon.h"
#include "tests/integration/server/raw_worker.h"

namespace gradwire::testing_support {

// Where the journals of slow jobs wait. Thread-safe.
class SlowGate {
 public:
  void Pass() {
    absl::MutexLock lock(&mu_);
    ++waiting_;
    mu_.Await(absl::Condition(&open_));
  }
  void Open() {
    absl::MutexLock lock(&mu_);
    open_ = true;
  }
  // False where they do not come.
  bool AwaitWaiting(int count) {
    absl::MutexLock lock(&mu_);
    const auto waiting = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return waiting_ >= count; };
    return mu_.AwaitWithTimeout(absl::Condition(&waiting), absl::Seconds(20));
  }

 private:
  absl::Mutex mu_;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
};

// A journal that takes initial parameters at once, and updates when the gate lets it.
class SlowJournal final : public UpdateSink {
 public:
  explicit SlowJournal(std::shared_ptr<SlowGate> gate) : gate_(std::move(gate)) {}
  void Append(journal::Record record, std::function<void()> visible) override {
    if (record.type == journal::RecordType::kUpdate) gate_->Pass();
    visible();
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}

 private:
  const std::shared_ptr<SlowGate> gate_;
};

// Two workers of a job, of whom one goes without a word once both have begun: the ticker ends its lease, and closes the
// round that waits for it. The other one pushes for the round and says that it is there.
class HalfLostJob {
 public:
  static constexpr uint32_t kLeaseMs = 2000;

  // `gate`: closing a round waits there; null: it is as ever.
  HalfLostJob(Daemon& daemon, const std::string& address, const std::string& name,
              const std::shared_ptr<SlowGate>& gate)
      : stays_(address, Spec(name), "stays", 1), goes_(address, Spec(name), "goes", 2) {
    const auto job = daemon.registry().GetOrCreate(Spec(name), 0, 1, 0);
    EXPECT_EQ(job.status(), absl::OkStatus());
    if (gate != nullptr && job.ok()) (*job)->log().SetSink(std::make_unique<SlowJournal>(gate));
    EXPECT_EQ(stays_.Start(1.0f), absl::OkStatus());
    EXPECT_EQ(goes_.Start(1.0f), absl::OkStatus());
    EXPECT_EQ(stays_.PushAll(0, 1.0f), absl::OkStatus());
    alive_ = std::jthread([this](const std::stop_token& stop) {
      for (; !stop.stop_requested(); absl::SleepFor(absl::Milliseconds(kLeaseMs / 10)))
        stays_.Heartbeat().IgnoreError();
    });
  }
  // How the first round ended.
  absl::Status Closed() { return stays_.FollowUpdate(1).status(); }

 private:
  static v1::JobSpec Spec(const std::string& name) { return SmallSpec(name, 2, "dense:values=fp32", kLeaseMs); }

  RawWorker stays_, goes_;
  std::jthread alive_;
};

// More of them than a few.
inline std::vector<std::unique_ptr<HalfLostJob>> SlowJobs(Daemon& daemon, const std::string& address,
                                                          const std::shared_ptr<SlowGate>& gate) {
  constexpr int kJobs = 8;
  std::vector<std::unique_ptr<HalfLostJob>> jobs;
  for (int j = 0; j < kJobs; ++j)
    jobs.push_back(std::make_unique<HalfLostJob>(daemon, address, absl::StrCat("slow-", j), gate));
  EXPECT_TRUE(gate->AwaitWaiting(kJobs)) << "of all of them rounds are being closed";
  return jobs;
}

}  // namespace gradwire::testing_support
