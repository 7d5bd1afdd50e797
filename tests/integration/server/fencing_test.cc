// Who can fence a server: one of its own lineage, and nobody else. What strangers say changes nothing, neither in the
// process nor on its disk.
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "common/storage/data_directory.h"
#include "gradwire/v1/replication.pb.h"
#include "server/replication/epoch.h"
#include "tests/integration/server/standby_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::RawWorker;
using testing_support::StandbyFixture;

constexpr uint64_t kLarge = (uint64_t{1} << 63) + 5;

class FencingTest : public StandbyFixture {
 protected:
  std::string ReadFile(const std::string& name) {
    std::stringstream text;
    text << std::ifstream(root_ + "/primary/" + name).rdbuf();
    return text.str();
  }
  Lineage LineageOfPrimary() {
    const auto lineage = Lineage::Parse(ReadFile("LINEAGE").substr(0, 2 * Lineage::kKeyBytes));
    EXPECT_TRUE(lineage.ok()) << lineage.status();
    return lineage.ok() ? *lineage : Lineage();
  }
  absl::Status Fence(uint64_t epoch, const std::string& key, const std::string& name = "stranger") {
    v1::FenceRequest request;
    request.set_server_epoch(epoch);
    request.set_name(name);
    request.set_lineage_key(key);
    return (*transport::Dial(primary_.address))
        ->Call("gradwire.v1.Replication/Fence", request.SerializeAsString(), 10'000)
        .status();
  }
  void StartPrimary() {
    primary_.directory = "primary";
    Start(primary_);
    StartWorkers(Spec());
    Step(0);
  }
  // Not in the process, not on the disk, not after a start.
  void ExpectNotFenced(uint64_t round) {
    EXPECT_FALSE(Shard(primary_).fenced());
    EXPECT_FALSE(std::filesystem::exists(root_ + "/primary/ROLE"));
    Step(round);
    Start(primary_);
    EXPECT_FALSE(Shard(primary_).fenced());
    ResumeBoth(primary_, round + 1);
    Step(round + 1);
  }
};

TEST_F(FencingTest, FenceOfAStrangerIsRefused) {
  StartPrimary();
  const std::string key(Lineage::kKeyBytes, 'k');
  for (const uint64_t epoch : {kLarge, UINT64_MAX, NextTerm(1)}) {
    EXPECT_EQ(Fence(epoch, "").code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(Fence(epoch, key).code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(Fence(epoch, std::string(1 << 20, 'k')).code(), absl::StatusCode::kPermissionDenied);
  }
  const std::string id = absl::StrCat(Shard(primary_).lineage());
  EXPECT_EQ(Fence(NextTerm(1), id).code(), absl::StatusCode::kPermissionDenied) << "what workers know is not the key";
  ExpectNotFenced(1);
}

TEST_F(FencingTest, FenceWithAnImpossibleEpochOrNameIsRefusedWhoeverSaysIt) {
  StartPrimary();
  const std::string key = LineageOfPrimary().key();
  for (const uint64_t epoch : {kLarge, UINT64_MAX, uint64_t{1} << 62, (kMaxTermsAhead + 1) << 32, uint64_t{1}})
    EXPECT_EQ(Fence(epoch, key).code(), absl::StatusCode::kFailedPrecondition) << epoch;
  for (const std::string& name : {std::string(), std::string(5000, 'n'), std::string("a\nfenced 9 b"),
                                  std::string("a b"), std::string("\x1b[2J")}) {
    const absl::Status refused = Fence(NextTerm(1), key, name);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_LT(refused.message().size(), 1000u);
    EXPECT_THAT(std::string(refused.message()), testing::Not(HasSubstr("\n")));
  }
  ExpectNotFenced(1);
}

TEST_F(FencingTest, SuccessorFencesItForGood) {
  StartPrimary();
  ASSERT_EQ(Fence(NextTerm(1), LineageOfPrimary().key(), "successor"), absl::OkStatus());
  EXPECT_TRUE(Shard(primary_).fenced());
  EXPECT_THAT(ReadFile("ROLE"), HasSubstr("fenced 4294967297 successor"));
  Start(primary_);
  EXPECT_TRUE(Shard(primary_).fenced());
}

TEST_F(FencingTest, WorkerThatSaysItKnowsALaterServerIsRefusedAlone) {
  StartPrimary();
  RawWorker stranger(primary_.address, Spec(), "stranger", 13);
  const uint64_t own = Shard(primary_).lineage();
  for (const std::string& job : {std::string("job"), std::string("none")}) {
    for (const uint64_t lineage : {uint64_t{0}, uint64_t{77}, own}) {
      if (job == "job" && lineage != own) continue;  // epochs are not compared: it is a worker like any other
      for (const uint64_t epoch : {kLarge, UINT64_MAX, NextTerm(1), uint64_t{2}}) {
        v1::JoinRequest request = stranger.JoinRequest();
        request.mutable_identity()->set_job(job);
        request.mutable_spec()->set_name(job);
        request.set_resume(true);
        request.set_known_epoch(epoch);
        request.set_known_lineage(lineage);
        EXPECT_FALSE(stranger.Join(request).ok());
        ASSERT_FALSE(Shard(primary_).fenced()) << job << " " << lineage << " " << epoch;
      }
    }
  }
  ExpectNotFenced(1);
}

TEST_F(FencingTest, WorkerOfAServerWithoutADirectoryGoesToItsSuccessorWithOne) {
  // The epoch of the first one is a random number, which is larger than any of a directory.
  primary_.directory = "";
  Start(primary_);
  v1::JobSpec spec = Spec();
  spec.clear_durability();
  StartWorkers(spec);
  const v1::JoinReply before = *a_->Join();
  EXPECT_NE(before.lineage(), 0u);
  primary_.directory = "primary";
  Start(primary_);
  EXPECT_NE(Shard(primary_).lineage(), before.lineage());
  const absl::Status refused = a_->Resume(primary_.address, 0, std::max(before.server_epoch(), kLarge)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound) << refused;
  StartWorkers(Spec());
  Step(0);
  ExpectNotFenced(1);
}

TEST_F(FencingTest, DirectoryOfBeforeGetsALineage) {
  StartPrimary();
  const uint64_t first = Shard(primary_).lineage();
  primary_.daemon.reset();
  std::filesystem::remove(root_ + "/primary/LINEAGE");
  Start(primary_);
  EXPECT_NE(Shard(primary_).lineage(), 0u);
  EXPECT_NE(Shard(primary_).lineage(), first);
  ResumeBoth(primary_, 1);
  Step(1);
  // A standby of before takes it with what follows.
  const uint64_t second = Shard(primary_).lineage();
  StartStandby();
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_EQ(Shard(standby_).lineage(), second);
  standby_.daemon.reset();
  std::filesystem::remove(root_ + "/standby/LINEAGE");
  Start(standby_);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_EQ(Shard(standby_).lineage(), second);
  // And can take over with it.
  ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
  EXPECT_TRUE(Shard(primary_).fenced());
}

TEST_F(FencingTest, PromotionDoesNotStopAtAStrangerWhereThePrimaryWas) {
  StartPair();
  StartWorkers(Spec());
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  Step(0);
  primary_.daemon.reset();
  std::filesystem::remove_all(root_ + "/primary");
  Start(primary_);  // another server at its address
  ASSERT_EQ(standby_.daemon->replication().Promote(true).status(), absl::OkStatus());
  EXPECT_FALSE(Shard(primary_).fenced()) << "it was never followed";
  ResumeBoth(standby_, 1);
  Step(1);
}

}  // namespace
}  // namespace gradwire
