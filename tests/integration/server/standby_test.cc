// A standby has every version that anybody saw, goes on where its primary ended, and the former primary is out.
#include <gmock/gmock.h>

#include "server/replication/epoch.h"
#include "tests/integration/server/standby_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::RawWorker;
using testing_support::StandbyFixture;

class StandbyTest : public StandbyFixture {};

TEST_F(StandbyTest, HasTheParametersOfEveryVersion) {
  for (const char* codec :
       {"dense:values=fp32", "dense:values=fixed16", "tagc:density=0.05,bits=2", "tagc:density=0.05,form=sketch"}) {
    for (const v1::DurabilityLevel level : {v1::DURABILITY_FSYNC, v1::DURABILITY_INTERVAL}) {
      SCOPED_TRACE(absl::StrCat(codec, " level ", level));
      StartPair();
      StartWorkers(Spec(codec, level));
      ASSERT_TRUE(Eventually([&] { return InSync(); }));
      for (uint64_t round = 0; round < 6; ++round) {
        Step(round);
        if (HasFatalFailure()) return;
        // Workers have it, so the standby has.
        const v1::JobStatus copy = Status(standby_);
        EXPECT_EQ(copy.version(), round + 1);
        EXPECT_EQ(copy.parameters_sha256(), Status(primary_).parameters_sha256());
        EXPECT_TRUE(copy.initialized());
      }
      EXPECT_EQ(Status(primary_).followers(0).version(), 6u);
      a_.reset();
      b_.reset();
      standby_.daemon.reset();
      primary_.daemon.reset();
      std::filesystem::remove_all(root_ + "/primary");
      std::filesystem::remove_all(root_ + "/standby");
    }
  }
}

TEST_F(StandbyTest, HasReplacedParameters) {
  StartPair();
  StartWorkers(Spec("tagc:density=0.05"));
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  ASSERT_EQ(a_->ReplaceAll(3, 2.5f), absl::OkStatus());
  ASSERT_EQ(b_->ReplaceAll(3, 2.5f), absl::OkStatus());
  Follow(4);
  EXPECT_EQ(Status(standby_).version(), 4u);
  EXPECT_EQ(Status(standby_).parameters_sha256(), Status(primary_).parameters_sha256());
  Step(4);
  const std::string expected = Status(primary_).parameters_sha256();
  primary_.daemon.reset();
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  ResumeBoth(standby_, 5);
  EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
  EXPECT_EQ(Status(standby_).rounds().nonfinite_rounds(), 1u);
  Step(5);
}

TEST_F(StandbyTest, GoesOnWhereItsPrimaryDied) {
  for (const char* codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    SCOPED_TRACE(codec);
    const v1::JobSpec spec = Spec(codec);
    const std::string expected = Undisturbed(spec, 8);
    StartPair();
    StartWorkers(spec);
    ASSERT_TRUE(Eventually([&] { return InSync(); }));
    for (uint64_t round = 0; round < 4; ++round) Step(round);
    // Bucket 0 of round 4 closes, bucket 1 has only a's frame.
    const auto a0 = a_->frames().Push(0, 4, Value(4)), a1 = a_->frames().Push(1, 4, Value(4));
    const auto b0 = b_->frames().Push(0, 4, -Value(4) / 3), b1 = b_->frames().Push(1, 4, -Value(4) / 3);
    for (const auto& frame : {a0, a1}) ASSERT_EQ(a_->Push(frame)->outcome(), v1::PUSH_INCLUDED);
    ASSERT_EQ(b_->Push(b0)->outcome(), v1::PUSH_INCLUDED);
    ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 5).ok());
    ASSERT_EQ(a_->NextAnswer()->control.bucket(), 0u);  // it is on the standby
    primary_.daemon.reset();
    ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
    const auto resumed = a_->Resume(standby_.address, 4);
    ASSERT_EQ(resumed.status(), absl::OkStatus());
    EXPECT_EQ(TermOf(resumed->server_epoch()), 1u);
    EXPECT_EQ(a_->Push(a0)->outcome(), v1::PUSH_DUPLICATE);
    EXPECT_EQ(a_->Push(a1)->outcome(), v1::PUSH_INCLUDED);
    EXPECT_EQ(a_->Push(a_->frames().Push(0, 4, 7.0f))->outcome(), v1::PUSH_REFUSED) << "other bytes";
    EXPECT_EQ(Status(standby_).version(), 4u) << "the round waits for b, which was in it";
    ASSERT_TRUE(b_->Resume(standby_.address, 4).ok());
    EXPECT_EQ(b_->Push(b0)->outcome(), v1::PUSH_DUPLICATE);
    EXPECT_EQ(b_->Push(b1)->outcome(), v1::PUSH_INCLUDED);
    Follow(5);
    for (uint64_t round = 5; round < 8; ++round) Step(round);
    EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
    // It is a primary for good.
    a_.reset();
    b_.reset();
    Start(standby_);
    EXPECT_EQ(Status(standby_).version(), 8u);
    EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
    EXPECT_EQ(Shard(standby_).following(), "");
    standby_.daemon.reset();
    std::filesystem::remove_all(root_ + "/primary");
    std::filesystem::remove_all(root_ + "/standby");
  }
}

TEST_F(StandbyTest, LearnsOfARoundThatWasOverBeforeItCame) {
  const v1::JobSpec spec = Spec();
  primary_.directory = "primary";
  Start(primary_);
  StartWorkers(spec);
  Step(0);
  Step(1);
  const auto a0 = a_->frames().Push(0, 2, Value(2));
  Step(2);
  StartStandby();
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  // A worker that has not heard of the end of round 2 sends again and asks for its update.
  ASSERT_EQ(a_->Resume(standby_.address, 2).status(), absl::OkStatus());
  EXPECT_EQ(a_->Push(a0)->outcome(), v1::PUSH_DUPLICATE);
  ASSERT_TRUE(a_->RequestPull(v1::PULL_UPDATE, 3).ok());
  EXPECT_EQ(a_->NextAnswer()->control.code(), 0);
}

TEST_F(StandbyTest, ComesLateAfterASnapshotCutTheJournal) {
  const v1::JobSpec spec = Spec("tagc:density=0.05");
  const std::string expected = Undisturbed(spec, 9);
  primary_.directory = "primary";
  Start(primary_);
  StartWorkers(spec);
  for (uint64_t round = 0; round < 6; ++round) {
    Step(round);
    ASSERT_EQ(primary_.daemon->registry().RequestSnapshot("job"), absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return Status(primary_).durability().snapshot_version() == round + 1; }));
  }
  StartStandby();
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_EQ(Status(standby_).parameters_sha256(), Status(primary_).parameters_sha256());
  Step(6);
  // It takes snapshots of its own, and starts again from what it has.
  ASSERT_EQ(standby_.daemon->registry().RequestSnapshot("job"), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return Status(standby_).durability().snapshot_version() == 7; }));
  Step(7);
  primary_.daemon.reset();
  standby_.daemon.reset();
  Start(standby_);
  EXPECT_EQ(Status(standby_).version(), 8u);
  const auto refused = standby_.daemon->replication().Promote(false);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << "it has not heard since it started";
  ASSERT_EQ(standby_.daemon->replication().Promote(true).status(), absl::OkStatus());
  ResumeBoth(standby_, 8);
  Step(8);
  EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
}

TEST_F(StandbyTest, ThatIsGoneIsNotWaitedForAndComesBack) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  standby_.daemon.reset();
  Step(1);
  EXPECT_EQ(Status(primary_).followers_size(), 0);
  Start(standby_);
  Step(2);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(3);
  EXPECT_EQ(Status(standby_).version(), 4u);
  EXPECT_EQ(Status(standby_).parameters_sha256(), Status(primary_).parameters_sha256());
}

TEST_F(StandbyTest, FollowsJobsThatComeAndGo) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  ASSERT_EQ(primary_.daemon->registry().Delete("job"), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return std::filesystem::is_empty(root_ + "/standby/jobs"); }));
  StartWorkers(Spec("tagc:density=0.05"));
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  Step(1);
  EXPECT_EQ(Status(standby_).version(), 2u);
}

TEST_F(StandbyTest, ServesOperatorsAndNoWorkers) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  RawWorker worker(standby_.address, Spec(), "c", 13);
  const absl::Status refused = worker.Join().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("standby of " + primary_.address));
  EXPECT_TRUE(testing_support::DescribeJob(worker.channel(), "job", true).ok());
  v1::DeleteJobRequest request;
  request.set_job("job");
  EXPECT_EQ(
      worker.channel().Call("gradwire.v1.Operator/DeleteJob", request.SerializeAsString(), 10'000).status().code(),
      absl::StatusCode::kUnavailable);
  EXPECT_EQ(Shard(standby_).following(), primary_.address);
}

TEST_F(StandbyTest, TakesOverFromALivingPrimaryWhichIsFenced) {
  const v1::JobSpec spec = Spec();
  const std::string expected = Undisturbed(spec, 6);
  StartPair();
  StartWorkers(spec);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  const auto frame = a_->frames().Push(0, 3, Value(3));
  ASSERT_EQ(a_->Push(frame)->outcome(), v1::PUSH_INCLUDED);
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  EXPECT_TRUE(Shard(primary_).fenced());
  const absl::Status ended = a_->push_inbox().Closed();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("fenced"));
  EXPECT_EQ(a_->Resume(primary_.address, 3).status().code(), absl::StatusCode::kUnavailable);
  // The frame that only the old one had merged is sent again, and counts once.
  ResumeBoth(standby_, 3);
  EXPECT_EQ(a_->Push(frame)->outcome(), v1::PUSH_INCLUDED);
  ASSERT_EQ(a_->Push(a_->frames().Push(1, 3, Value(3)))->outcome(), v1::PUSH_INCLUDED);
  ASSERT_EQ(b_->PushAll(3, -Value(3) / 3), absl::OkStatus());
  Follow(4);
  // The old one stays out when it starts again, and may become the other's standby.
  Start(primary_);
  EXPECT_TRUE(Shard(primary_).fenced());
  EXPECT_EQ(Status(primary_).version(), 3u) << "operators may look";
  EXPECT_EQ(RawWorker(primary_.address, spec, "c", 13).Join().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(primary_.daemon->replication().Promote(true).status().code(), absl::StatusCode::kFailedPrecondition);
  primary_.follow = standby_.address;
  Start(primary_);
  std::swap(primary_, standby_);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(4);
  EXPECT_EQ(Status(standby_).version(), 5u);
  // And back again.
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  EXPECT_EQ(TermOf(Shard(standby_).server_epoch()), 2u);
  ResumeBoth(standby_, 5);
  Step(5);
  EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
}

TEST_F(StandbyTest, OldPrimaryThatStartsAgainIsTold) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  primary_.daemon.reset();
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  Start(primary_);
  EXPECT_TRUE(Eventually([&] { return Shard(primary_).fenced(); }));
}

TEST_F(StandbyTest, WorkerThatKnowsTheLaterServerIsSentThereAndTheOthersGoOn) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  const absl::Status told = a_->Resume(primary_.address, 1, NextTerm(Shard(primary_).server_epoch())).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(told.message()), HasSubstr("has replaced this one"));
  EXPECT_FALSE(Shard(primary_).fenced()) << "everybody can say so";
  ASSERT_EQ(a_->Resume(primary_.address, 1).status(), absl::OkStatus());
  Step(1);
}

TEST_F(StandbyTest, DataDirectoriesAreNotTakenForWhatTheyAreNot) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  standby_.daemon.reset();
  Node as_primary = {.address = "", .directory = "standby", .follow = ""};
  EXPECT_THAT(std::string(TryStart(as_primary).message()), HasSubstr("that of a standby"));
  primary_.daemon.reset();
  Node as_standby = {.address = "", .directory = "primary", .follow = "inproc://somewhere"};
  EXPECT_THAT(std::string(TryStart(as_standby).message()), HasSubstr("has 1 jobs"));
}

}  // namespace
}  // namespace gradwire
