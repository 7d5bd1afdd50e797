#include "server/job/parameter_digest.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/sha256.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;
using testing_support::TestJob;

std::string DigestOfAll(TestJob& job, float value) {
  Sha256 sha;
  for (const auto& bucket : job.parts().buckets) {
    const std::vector<float> values(bucket->layout->elements, value);
    sha.Update(std::span<const float>(values));
  }
  return sha.Hex();
}

TEST(ParameterDigest, IsOfTheParametersAndComputedAgainOnlyWhenTheyChange) {
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  const auto member = job.Join("a");
  job.Initialize(*member, 1.0f);
  EXPECT_EQ(*digest.Get(), DigestOfAll(job, 1.0f));
  {
    // Behind its back, at the same version: nothing says that they have changed.
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    ASSERT_TRUE(bucket.store->Initialize(job.frames().Initialize(0, 2.0f)).ok());
  }
  EXPECT_EQ(*digest.Get(), DigestOfAll(job, 1.0f));
  {
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    ++bucket.version;
  }
  EXPECT_NE(*digest.Get(), DigestOfAll(job, 1.0f));
}

// Counts how often the parameters of another store are read.
class CountedStore final : public ParameterStore {
 public:
  CountedStore(std::unique_ptr<ParameterStore> of, std::atomic<int>* reads) : of_(std::move(of)), reads_(*reads) {}
  absl::Status Initialize(std::span<const Bytes> chunks) override { return of_->Initialize(chunks); }
  absl::Status Compress(const RoundPlan& plan, UpdateFrame* update) override { return of_->Compress(plan, update); }
  absl::Status ReplayCompression(const RoundPlan& plan, const UpdateFrame& update) override {
    return of_->ReplayCompression(plan, update);
  }
  absl::Status Apply(const UpdateFrame& update, const RoundPlan& plan) override { return of_->Apply(update, plan); }
  absl::StatusOr<std::vector<double>> Squares(const Update& update, size_t phase) override {
    return of_->Squares(update, phase);
  }
  wire::FrameToSend Serialize(const PlanWindow& plans, ParameterContent content) override {
    return of_->Serialize(plans, content);
  }
  void Read(const ParameterTargets& targets) override {
    ++reads_;
    of_->Read(targets);
  }
  void Load(const ParameterArrays& arrays) override { of_->Load(arrays); }

 private:
  const std::unique_ptr<ParameterStore> of_;
  std::atomic<int>& reads_;
};

TEST(ParameterDigest, IsComputedOnceForAllWhoWaitAndTheirNumberIsBounded) {
  constexpr size_t kMayWait = 16;
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  const auto member = job.Join("a");
  job.Initialize(*member, 1.0f);
  std::atomic<int> reads = 0, refused = 0;
  {
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    bucket.store = std::make_unique<CountedStore>(std::move(bucket.store), &reads);
  }
  std::vector<absl::StatusOr<std::string>> digests(kMayWait + 1);
  std::vector<std::thread> threads;
  absl::Mutex& turn = *job.parts().environment.digest_turn;
  turn.Lock();  // the first computation does not end before all have asked
  for (auto& one : digests) {
    threads.emplace_back([&] {
      one = digest.Get();
      refused += one.ok() ? 0 : 1;
    });
  }
  const absl::Time bound = absl::Now() + absl::Seconds(30);
  while (refused == 0 && absl::Now() < bound) absl::SleepFor(absl::Milliseconds(1));
  turn.Unlock();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reads, 1) << "for all who waited";
  EXPECT_EQ(refused, 1) << "one more than may wait";
  for (const auto& one : digests) {
    if (one.ok()) {
      EXPECT_EQ(*one, DigestOfAll(job, 1.0f));
    } else {
      EXPECT_EQ(one.status().code(), absl::StatusCode::kResourceExhausted) << one.status();
    }
  }
}

TEST(ParameterDigest, ThoseWhoWaitForOtherJobsCountToo) {
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  const auto member = job.Join("a");
  job.Initialize(*member, 1.0f);
  std::atomic<int>& waiters = *job.parts().environment.digest_waiters;
  waiters = 64;
  EXPECT_EQ(digest.Get().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(waiters, 64);
  waiters = 63;
  EXPECT_EQ(*digest.Get(), DigestOfAll(job, 1.0f));
  EXPECT_EQ(waiters, 63);
}

TEST(ParameterDigest, SaysWhyTheJobWasShut) {
  TestJob job(SmallSpec("job", 1));
  ParameterDigest digest(&job.parts());
  {
    absl::MutexLock lock(&job.parts().mu);
    job.parts().shut = absl::AbortedError("deleted");
  }
  EXPECT_EQ(digest.Get().status(), absl::AbortedError("deleted"));
}

TEST(ParameterDigest, OfAJobWithoutParametersIsEmpty) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  TestJob job(spec);
  EXPECT_EQ(*ParameterDigest(&job.parts()).Get(), "");
}

}  // namespace
}  // namespace gradwire
