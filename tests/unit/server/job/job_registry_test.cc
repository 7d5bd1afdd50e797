#include "server/job/job_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/unit/server/registry_fixture.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

using JobRegistryTest = testing_support::RegistryTest;

TEST_F(JobRegistryTest, AJobThatIsThereIsJoinedWithTheSameSpecAndShardingAlone) {
  const v1::JobSpec spec = Spec("job");
  const auto made = registry_->GetOrCreate(spec, 0, 2, 0);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(*registry_->GetOrCreate(spec, 0, 2, 0), *made);
  EXPECT_EQ(*registry_->GetOrCreate(spec, 0, 2, (*made)->layout().digest()), *made);
  EXPECT_THAT(std::string(registry_->GetOrCreate(spec, 1, 2, 0).status().message()),
              HasSubstr("is shard 0 of 2, asked for as"));
  EXPECT_THAT(std::string(registry_->GetOrCreate(spec, 0, 2, 77).status().message()), HasSubstr("digest"));
  v1::JobSpec other = spec;
  other.mutable_tensors(1)->set_shape(0, 17);
  other.set_lease_ms(spec.lease_ms() + 1);
  const absl::Status refused = registry_->GetOrCreate(other, 0, 2, 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("tensors[1].shape[0] is 16 here, 17 asked for"), Not(HasSubstr("lease_ms")),
                    HasSubstr("Use another name, or begin the job anew")));
  EXPECT_EQ(registry_->All().size(), 1u);
}

TEST_F(JobRegistryTest, OneJobIsMadeOfManyCalls) {
  std::vector<std::shared_ptr<JobShard>> made(8);
  std::vector<std::thread> threads;
  for (auto& job : made) threads.emplace_back([&] { job = Create(Spec("job")).value_or(nullptr); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(made, testing::Each(made[0]));
  ASSERT_NE(made[0], nullptr);
  EXPECT_EQ(registry_->memory_bytes(), made[0]->memory().total());
  EXPECT_GT(made[0]->memory().layout, 0u);
  EXPECT_GT(made[0]->memory().histories, 0u);
}

TEST_F(JobRegistryTest, ABoundedNumberOfCallsWaitForAJobThatIsBeingMade) {
  constexpr int kMayWait = 16;
  const v1::JobSpec spec = Spec("job", /*durable=*/true);
  absl::Notification begun, go_on;
  on_journal_ = [&] {
    begun.Notify();
    go_on.WaitForNotification();
  };
  std::atomic<int> made = 0, refused = 0;
  std::vector<std::thread> threads;
  const auto ask = [&] {
    const absl::Status asked = Create(spec).status();
    EXPECT_TRUE(asked.ok() || absl::IsUnavailable(asked)) << asked;
    ++(asked.ok() ? made : refused);
  };
  threads.emplace_back(ask);
  begun.WaitForNotification();
  for (int i = 0; i < kMayWait + 1; ++i) threads.emplace_back(ask);
  const absl::Time bound = absl::Now() + absl::Seconds(30);
  while (refused == 0 && absl::Now() < bound) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(refused, 1) << "one more than may wait: it is to try again";
  go_on.Notify();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, kMayWait + 1);
}

TEST_F(JobRegistryTest, TheDigestOfAShardMapIsComparedBeforeAnythingLargeIsMade) {
  const uint64_t one = (*Create(Spec("job")))->memory().total();
  Start({.memory_bytes = one - 1, .max_jobs = 16});
  EXPECT_EQ(Create(Spec("job")).status().code(), absl::StatusCode::kResourceExhausted);
  const absl::Status refused = registry_->GetOrCreate(Spec("job"), 0, 1, /*layout_digest=*/77).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("digest"));
}

TEST_F(JobRegistryTest, TheLimitOfMemoryIsToldWithTheNumbers) {
  const uint64_t one = (*Create(Spec("job", /*durable=*/true)))->memory().total();
  const uint64_t limit = 2 * one - 1;
  ASSERT_EQ(registry_->Delete("job"), absl::OkStatus());
  Start({.memory_bytes = limit, .max_jobs = 16});
  ASSERT_TRUE(Create(Spec("a", true)).ok());
  EXPECT_EQ(registry_->memory_bytes(), one);
  const absl::Status refused = Create(Spec("b", true)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("job 'b' may take " + std::to_string(one) + " bytes"),
                    HasSubstr(std::to_string(one) + " of its " + std::to_string(limit) + " (--memory-limit-bytes)"),
                    HasSubstr("use more shards, or delete one of those")));
  EXPECT_EQ(registry_->memory_bytes(), one);
  EXPECT_EQ(registry_->Find("b").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Stored(), ElementsAre("a.job"));
  ASSERT_EQ(registry_->Delete("a"), absl::OkStatus());
  EXPECT_TRUE(Create(Spec("b", true)).ok());
}

TEST_F(JobRegistryTest, WhatIsNotAJobOfThisServerIsRefusedAndLeavesNothing) {
  v1::JobSpec spec = Spec("job", /*durable=*/true);
  EXPECT_EQ(registry_->GetOrCreate(spec, 2, 2, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(registry_->GetOrCreate(spec, 0, 2, 77).status().message()), HasSubstr("digest"));
  spec.set_codec("none");
  EXPECT_EQ(Create(spec).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(registry_->memory_bytes(), 0u);
  EXPECT_THAT(registry_->All(), IsEmpty());
  EXPECT_THAT(Stored(), IsEmpty());
  EXPECT_EQ(changes_, 0);
}

TEST_F(JobRegistryTest, AJournalWithoutMemoryLeavesNothing) {
  on_journal_ = [] { throw std::bad_alloc(); };
  const absl::Status refused = Create(Spec("job", /*durable=*/true)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("job 'job' cannot be stored on this server: its journal: out of memory"));
  EXPECT_EQ(registry_->memory_bytes(), 0u);
  EXPECT_THAT(Stored(), IsEmpty());
  on_journal_ = nullptr;
  EXPECT_TRUE(Create(Spec("job", true)).ok());
}

TEST_F(JobRegistryTest, ADiskThatFailsWhileAJobIsMadeLeavesTheRegistryAsItWas) {
  ASSERT_TRUE(Create(Spec("other", /*durable=*/true)).ok());
  const uint64_t memory = registry_->memory_bytes();
  uint64_t call = 0;
  for (;; ++call) {
    SCOPED_TRACE(call);
    ASSERT_LT(call, 100u);
    disk_.CrashAt(disk_.calls() + call);
    const absl::Status made = Create(Spec("job", true)).status();
    disk_.ProcessDied();  // it is well again
    if (made.ok()) break;
    EXPECT_EQ(made.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(made.message()), HasSubstr("job 'job' cannot be stored on this server"));
    EXPECT_EQ(registry_->memory_bytes(), memory);
    EXPECT_EQ(registry_->Find("job").status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(registry_->Durable().size(), 1u);
    EXPECT_TRUE(registry_->Find("other").ok());
    ASSERT_EQ(Create(Spec("job", true)).status(), absl::OkStatus()) << "what stayed on the disk is in nobody's way";
    ASSERT_EQ(registry_->Delete("job"), absl::OkStatus());
    EXPECT_THAT(Stored(), ElementsAre("other.job"));
  }
  EXPECT_GT(call, 5u);
}

TEST_F(JobRegistryTest, DeleteEndsStreamsAndGivesBackMemoryAndDirectory) {
  ASSERT_TRUE(Create(Spec("job", /*durable=*/true)).ok());
  ASSERT_TRUE(Create(Spec("other", true)).ok());
  const Connected others = Connect("other", "a");
  const uint64_t one = others.job->memory().total();
  EXPECT_EQ(changes_, 2);
  {
    const Connected worker = Connect("job", "a");
    ASSERT_EQ(registry_->Delete("job"), absl::OkStatus());
    ASSERT_TRUE(worker.stream->finished.has_value());
    EXPECT_EQ(*worker.stream->finished, absl::AbortedError("job 'job' was deleted"));
    EXPECT_EQ(worker.job->Join(worker.identity, 0, true).status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(registry_->memory_bytes(), 2 * one) << "it is there while a stream keeps it";
  }
  EXPECT_EQ(changes_, 3);
  EXPECT_EQ(registry_->memory_bytes(), one);
  EXPECT_THAT(Stored(), ElementsAre("other.job"));
  EXPECT_EQ(registry_->Durable().size(), 1u);
  EXPECT_FALSE(others.stream->finished.has_value());
  const absl::Status again = registry_->Delete("job");
  EXPECT_EQ(again.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(again.message()), HasSubstr("job 'job' does not exist on this server"));
}

TEST_F(JobRegistryTest, WhatTheDiskDoesNotRemoveIsToldUntilItIsDeletedAgain) {
  ASSERT_TRUE(Create(Spec("job", /*durable=*/true)).ok());
  {
    const Connected worker = Connect("job", "a");
    disk_.CrashAt(disk_.calls());
    const absl::Status failed = registry_->Delete("job");
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(failed.message()),
                AllOf(HasSubstr("job 'job' was deleted, but what is stored of it cannot be removed"),
                      HasSubstr("the power is gone"), HasSubstr("delete it again")));
    EXPECT_TRUE(worker.stream->finished.has_value());
    EXPECT_EQ(changes_, 2) << "it is gone for standbys";
    disk_.ProcessDied();  // it is well again
    EXPECT_EQ(registry_->Find("job").status(), failed);
    EXPECT_EQ(Create(Spec("job", true)).status(), failed) << "the next start would find it";
    EXPECT_EQ(registry_->unrecovered(), 1u);
  }
  EXPECT_EQ(registry_->memory_bytes(), 0u);
  EXPECT_EQ(registry_->Delete("job"), absl::OkStatus());
  EXPECT_THAT(Stored(), IsEmpty());
  EXPECT_EQ(registry_->Find("job").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JobRegistryTest, WhoDrainsMakesAndJoinsNothing) {
  ASSERT_TRUE(Create(Spec("job")).ok());
  EXPECT_FALSE(registry_->draining());
  registry_->Drain();
  EXPECT_TRUE(registry_->draining());
  for (const char* name : {"job", "new"}) {
    const absl::Status refused = Create(Spec(name)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << name;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("shutting down"));
  }
  EXPECT_TRUE(registry_->Find("job").ok()) << "its workers end what they have begun";
  EXPECT_EQ(registry_->All().size(), 1u);
}

TEST_F(JobRegistryTest, WhatCannotBeRecoveredIsNamedAndStopsNobodyElse) {
  for (const char* name : {"a", "b", "c", "d"}) ASSERT_TRUE(Create(Spec(name, /*durable=*/true)).ok());
  ASSERT_TRUE(Create(Spec("none")).ok());
  const uint64_t one = (*registry_->Find("a"))->memory().total();
  disk_.FlipBit("/data/jobs/b.job/job", 100);
  ASSERT_EQ(disk_.RemoveDirectory("/data/jobs/c.job/journal"), absl::OkStatus());
  Start({.memory_bytes = 1 << 28, .max_jobs = 16}, /*recover=*/true);
  EXPECT_EQ(registry_->unrecovered(), 2u);
  EXPECT_EQ(registry_->memory_bytes(), 2 * one);
  for (const char* name : {"a", "d"}) {
    EXPECT_TRUE(registry_->Find(name).ok()) << name;
    EXPECT_TRUE(Create(Spec(name, true)).ok()) << name;
  }
  EXPECT_EQ(registry_->Find("none").status().code(), absl::StatusCode::kNotFound);
  for (const auto& [name, reason] :
       {std::pair("b", "b.job/job' is damaged"), std::pair("c", "c.job/journal' is missing")}) {
    for (const absl::Status& told : {registry_->Find(name).status(), Create(Spec(name, true)).status(),
                                     registry_->DeleteUnused(name, std::nullopt)}) {
      EXPECT_EQ(told.code(), absl::StatusCode::kDataLoss) << told;
      EXPECT_THAT(std::string(told.message()),
                  AllOf(HasSubstr(std::string("job '") + name + "' could not be recovered"), HasSubstr(reason)));
    }
    EXPECT_EQ(registry_->Delete(name), absl::OkStatus());
  }
  EXPECT_EQ(registry_->unrecovered(), 0u);
  EXPECT_THAT(Stored(), ElementsAre("a.job", "d.job"));
  EXPECT_TRUE(Create(Spec("b", true)).ok());
}

TEST_F(JobRegistryTest, WhatDoesNotFitAnyMoreIsNotRecovered) {
  for (const char* name : {"a", "b"}) ASSERT_TRUE(Create(Spec(name, /*durable=*/true)).ok());
  const uint64_t one = (*registry_->Find("a"))->memory().total();
  Start({.memory_bytes = 2 * one - 1, .max_jobs = 16}, /*recover=*/true);
  EXPECT_TRUE(registry_->Find("a").ok());
  const absl::Status told = registry_->Find("b").status();
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(told.message()),
              AllOf(HasSubstr("could not be recovered"), HasSubstr("--memory-limit-bytes")));
  EXPECT_THAT(Stored(), ElementsAre("a.job", "b.job")) << "it is kept for a start with more";
  EXPECT_EQ(registry_->memory_bytes(), one);
}

TEST_F(JobRegistryTest, SnapshotsAreOfDurableJobs) {
  ASSERT_TRUE(Create(Spec("job")).ok());
  const absl::Status refused = registry_->RequestSnapshot("job");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("job 'job' is not durable"));
  EXPECT_EQ(registry_->RequestSnapshot("other").code(), absl::StatusCode::kNotFound);
}

TEST_F(JobRegistryTest, AJobIsTheSameAfterAStartAndAnotherOneWhenItIsMadeAnew) {
  const uint64_t instance = (*Create(Spec("job", /*durable=*/true)))->instance();
  EXPECT_NE(instance, 0u);
  Start({.memory_bytes = 1 << 28, .max_jobs = 16}, /*recover=*/true);
  ASSERT_EQ((*registry_->Find("job"))->instance(), instance);
  EXPECT_TRUE((*registry_->Find("job"))->CheckInstance(instance).ok());
  EXPECT_TRUE((*registry_->Find("job"))->CheckInstance(0).ok()) << "of a worker that knows none";
  ASSERT_EQ(registry_->Delete("job"), absl::OkStatus());
  ASSERT_TRUE(Create(Spec("job", true)).ok());
  EXPECT_EQ((*registry_->Find("job"))->CheckInstance(instance).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobRegistryTest, AServerWithoutADirectoryTakesJobsThatAskForNone) {
  JobRegistry registry(registry_->environment(), {.memory_bytes = 1 << 28, .max_jobs = 16});
  const absl::Status refused = registry.GetOrCreate(Spec("job", /*durable=*/true), 0, 1, 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("start it with --data-dir"));
  EXPECT_EQ(registry.memory_bytes(), 0u);
  EXPECT_TRUE(registry.GetOrCreate(Spec("job"), 0, 1, 0).ok());
}

class StandbyRegistryTest : public JobRegistryTest {
 protected:
  static v1::StoredJob StoredAs(const v1::JobSpec& spec) {
    v1::StoredJob stored;
    *stored.mutable_spec() = spec;
    stored.set_shard_count(1);
    return stored;
  }
};

TEST_F(StandbyRegistryTest, GoesOnFromACopyOfTheSameHistoryAlone) {
  const v1::StoredJob stored = StoredAs(Spec("job", /*durable=*/true));
  EXPECT_EQ(registry_->GoOn(stored, 0, 5).status().code(), absl::StatusCode::kFailedPrecondition) << "nothing is here";
  const auto copy = registry_->Adopt(stored, 0, 5);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(*registry_->GoOn(stored, 0, 5), *copy);
  for (const uint64_t other : {uint64_t{0}, uint64_t{6}}) {
    const absl::Status refused = registry_->GoOn(stored, 0, other).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("no copy of this history"));
  }
  v1::StoredJob changed = stored;
  changed.mutable_spec()->set_lease_ms(1000);
  EXPECT_THAT(std::string(registry_->GoOn(changed, 0, 5).status().message()), HasSubstr("another spec: lease_ms"));
}

TEST_F(StandbyRegistryTest, WhatItIsGivenReplacesWhatIsHere) {
  v1::StoredJob stored = StoredAs(Spec("job", /*durable=*/true));
  stored.set_instance(9);
  const auto before = registry_->Adopt(stored, 0, 5);
  ASSERT_TRUE(before.ok()) << before.status();
  const uint64_t one = registry_->memory_bytes();
  const auto after = registry_->Adopt(stored, 0, 6);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_NE(*after, *before);
  EXPECT_EQ(*registry_->Find("job"), *after);
  EXPECT_EQ((*after)->instance(), 9u);
  EXPECT_EQ(registry_->memory_bytes(), one) << "what goes does not stand in its way";
  EXPECT_EQ(registry_->Durable()[0].followed_history, 6u);
}

TEST_F(StandbyRegistryTest, WhoHasBeenReplacedKeepsDurableJobsAlone) {
  ASSERT_TRUE(Create(Spec("kept", /*durable=*/true)).ok());
  ASSERT_TRUE(Create(Spec("none")).ok());
  const Connected worker = Connect("kept", "a");
  const absl::Status fenced = absl::UnavailableError("another server has taken over");
  registry_->FenceAll(fenced);
  EXPECT_EQ(*worker.stream->finished, fenced);
  ASSERT_EQ(registry_->BeginFollowing(), absl::OkStatus());
  EXPECT_EQ(registry_->Find("none").status().code(), absl::StatusCode::kNotFound);
  const auto kept = registry_->Find("kept");
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_NE(*kept, worker.job);
  EXPECT_EQ(registry_->memory_bytes(), (*kept)->memory().total());
  registry_->EndFollowing();
  EXPECT_TRUE((*kept)->Join(worker.identity, 0, true).ok());
}

}  // namespace
}  // namespace gradwire
