// Jobs that nobody uses: which end by themselves, which stay until they are deleted, and who is told of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "tests/unit/server/registry_fixture.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class UnusedJobsTest : public testing_support::RegistryTest {
 protected:
  static constexpr TimeNs kUnused = 10 * kSecond;

  void StartWith(TimeNs unused_job_ns) {
    Start({.memory_bytes = 1 << 28, .max_jobs = 16, .unused_job_ns = unused_job_ns});
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& job : registry_->All()) names.push_back(job->job().spec().name());
    return names;
  }
};

TEST_F(UnusedJobsTest, TheLimitOfJobsIsToldWithWhatToDo) {
  Start({.memory_bytes = 1 << 28, .max_jobs = 3});
  for (const char* name : {"busy", "idle"}) ASSERT_TRUE(Create(Spec(name)).ok());
  ASSERT_TRUE(Create(Spec("kept", /*durable=*/true)).ok());
  Connect("busy", "a");
  const uint64_t memory = registry_->memory_bytes();
  clock_.now += 5 * kSecond;
  const absl::Status refused = Create(Spec("new", true)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("job 'new': this server has 3 jobs and --max-jobs is 3"),
                    HasSubstr("without workers: 'idle' (for 5 s): `gradwire job prune` deletes these"),
                    HasSubstr("kept until deleted: 'kept' (for 5 s): `gradwire job delete` deletes one"),
                    Not(HasSubstr("busy"))));
  EXPECT_EQ(registry_->memory_bytes(), memory);
  EXPECT_EQ(registry_->Find("new").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Stored(), ElementsAre("kept.job"));
  Connect("idle", "a");
  Connect("kept", "a");
  EXPECT_THAT(std::string(Create(Spec("new")).status().message()),
              AllOf(HasSubstr("all of them have workers: delete one with `gradwire job delete`"),
                    Not(HasSubstr("without workers"))));
  EXPECT_TRUE(Create(Spec("idle")).ok()) << "one that is there takes no place";
  ASSERT_EQ(registry_->Delete("idle"), absl::OkStatus());
  EXPECT_TRUE(Create(Spec("new")).ok());
}

TEST_F(UnusedJobsTest, OfManyOnlySomeAreNamed) {
  Start({.memory_bytes = 1 << 28, .max_jobs = 10});
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Create(Spec("job" + std::to_string(i))).ok());
  clock_.now += kSecond;
  EXPECT_THAT(std::string(Create(Spec("new")).status().message()),
              AllOf(HasSubstr("'job7' (for 1 s) and 2 more: "), Not(HasSubstr("job8"))));
}

TEST_F(UnusedJobsTest, EndAfterTheirTimeUnlessTheyAreDurable) {
  StartWith(kUnused);
  for (const char* name : {"busy", "idle"}) ASSERT_TRUE(Create(Spec(name)).ok());
  ASSERT_TRUE(Create(Spec("kept", /*durable=*/true)).ok());
  std::shared_ptr<JobShard> idle = *registry_->Find("idle");
  Connected worker = Connect("busy", "a");
  clock_.now += kUnused - 1;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("busy", "idle", "kept"));
  clock_.now += 1;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("busy", "kept"));
  // Who has found it before is told why it is gone.
  const absl::Status ended = idle->Join(worker.identity, 0, true).status();
  EXPECT_EQ(ended.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("job 'idle' ended: it had no workers for 10 s"));
  const uint64_t one = idle->memory().total();
  const uint64_t before = registry_->memory_bytes();
  idle.reset();
  EXPECT_EQ(registry_->memory_bytes(), before - one);

  Leave(worker);  // its time begins
  worker.job.reset();
  clock_.now += kUnused - 1;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("busy", "kept"));
  clock_.now += 1;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("kept"));
}

TEST_F(UnusedJobsTest, TheTimeOfALostWorkersJobBeginsWhenItsLeaseEnds) {
  StartWith(kUnused);
  v1::JobSpec spec = Spec("job");
  spec.set_lease_ms(5'000);
  ASSERT_TRUE(Create(spec).ok());
  Connect("job", "a");
  clock_.now += 5 * kSecond;
  registry_->Tick();
  clock_.now += kUnused - 1;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("job"));
  clock_.now += 1;
  registry_->Tick();
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_F(UnusedJobsTest, StayWhereNoTimeIsSet) {
  StartWith(0);
  ASSERT_TRUE(Create(Spec("idle")).ok());
  clock_.now += 1000 * kUnused;
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("idle"));
}

TEST_F(UnusedJobsTest, LeasesDoNotWaitForAJobThatIsBeingMade) {
  StartWith(kUnused);
  ASSERT_TRUE(Create(Spec("idle")).ok());
  clock_.now += kUnused;
  absl::Notification ticked;
  std::thread ticking;
  bool in_time = false;
  on_journal_ = [&] {
    ticking = std::thread([&] {
      registry_->Tick();
      ticked.Notify();
    });
    in_time = ticked.WaitForNotificationWithTimeout(absl::Seconds(10));
  };
  EXPECT_TRUE(Create(Spec("new", /*durable=*/true)).ok());
  ASSERT_TRUE(ticking.joinable());
  ticking.join();
  EXPECT_TRUE(in_time);
  EXPECT_THAT(Names(), ElementsAre("idle", "new"));
  registry_->Tick();
  EXPECT_THAT(Names(), ElementsAre("new"));
}

TEST_F(UnusedJobsTest, AreDeletedUnlessSomebodyHasComeMeanwhile) {
  ASSERT_TRUE(Create(Spec("job", /*durable=*/true)).ok());
  const Connected worker = Connect("job", "a");
  absl::Status refused = registry_->DeleteUnused("job", std::nullopt);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("job 'job' has 1 workers, one of them is 'a'"));
  EXPECT_FALSE(worker.stream->finished.has_value());
  Leave(worker);
  refused = registry_->DeleteUnused("job", 7);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("job 'job' is at version 0, not 7"));
  EXPECT_THAT(Stored(), ElementsAre("job.job"));
  EXPECT_EQ(registry_->DeleteUnused("job", 0), absl::OkStatus());
  EXPECT_THAT(Stored(), IsEmpty());
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_EQ(registry_->DeleteUnused("job", std::nullopt).code(), absl::StatusCode::kNotFound);
}

TEST_F(UnusedJobsTest, AreForgottenWhereTheOtherShardsHaveMore) {
  const v1::JobSpec spec = Spec("job", /*durable=*/true);
  ASSERT_TRUE(Create(spec).ok());
  const Connected worker = Connect("job", "a");
  registry_->ForgetUnused(worker.job);
  EXPECT_THAT(Names(), ElementsAre("job")) << "it has a worker";
  Leave(worker);
  registry_->ForgetUnused(worker.job);
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_THAT(Stored(), IsEmpty());

  ASSERT_TRUE(Create(spec).ok());
  registry_->ForgetUnused(worker.job);
  EXPECT_THAT(Names(), ElementsAre("job")) << "another one of this name";
  const Connected brings = Connect("job", "b");
  Initialize(brings, spec);
  Leave(brings);
  registry_->ForgetUnused(brings.job);
  EXPECT_THAT(Names(), ElementsAre("job")) << "it has parameters";
}

}  // namespace
}  // namespace gradwire
