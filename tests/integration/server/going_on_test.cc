// A standby that comes back goes on from the records it has where that is safe, and takes the whole state where it is
// not.
#include <gmock/gmock.h>

#include <fstream>

#include "gradwire/v1/replication.pb.h"
#include "server/replication/record_pieces.h"
#include "tests/integration/server/standby_fixture.h"

namespace gradwire {
namespace {

using testing_support::Inbox;
using testing_support::StandbyFixture;

class GoingOnTest : public StandbyFixture {
 protected:
  // Between Mark and GoneOn: the standby kept the copy that it had, which is made anew with its directory. To be asked
  // once it is in sync: it begins to follow as soon as it starts.
  void Mark() {
    std::ofstream(MarkPath()) << "kept";
    ASSERT_TRUE(GoneOn());
  }
  bool GoneOn() const { return std::filesystem::exists(MarkPath()); }
  // The standby is started again, and in sync; GoneOn() says how it came to be.
  void ComeBack() {
    Mark();
    Start(standby_);
    ASSERT_TRUE(Eventually([&] { return InSync(); }));
  }
  // Rounds of a pair in sync, up to `rounds`.
  void Begin(uint64_t rounds) {
    StartPair();
    StartWorkers(Spec());
    ASSERT_TRUE(Eventually([&] { return InSync(); }));
    for (uint64_t round = 0; round < rounds; ++round) Step(round);
  }
  std::string MarkPath() const { return root_ + "/standby/jobs/job.job/mark"; }
  void ExpectSame() {
    EXPECT_EQ(Status(standby_).version(), Status(primary_).version());
    EXPECT_EQ(Status(standby_).parameters_sha256(), Status(primary_).parameters_sha256());
  }
  // What the primary begins the job with, for a standby that says it has `copy`; the first records behind it.
  struct Begun {
    v1::FollowBegin begin;
    std::vector<journal::Record> records;
  };
  Begun Open(const v1::FollowCopy& copy, size_t records) {
    Inbox inbox;
    const auto channel = *transport::Dial(primary_.address);
    const auto stream = *channel->Open("gradwire.v1.Replication/Follow", &inbox);
    v1::FollowRequest open;
    open.mutable_open()->set_name("scripted");
    *open.mutable_open()->add_copies() = copy;
    EXPECT_TRUE(stream->Send({open.SerializeAsString(), {}}).ok());
    Begun begun;
    RecordAssembler assembler(1 << 20);
    while (begun.records.size() < records || !begun.begin.has_stored()) {
      const auto message = inbox.Next();
      EXPECT_TRUE(message.ok()) << message.status();
      if (!message.ok()) break;
      v1::FollowMessage said;
      EXPECT_TRUE(said.ParseFromString(message->control));
      if (said.has_begin()) begun.begin = said.begin();
      if (!said.has_record()) continue;
      auto record = assembler.Add(message->frame, said.record().last());
      EXPECT_TRUE(record.ok() && record->has_value());
      begun.records.push_back(**std::move(record));
    }
    return begun;
  }
};

TEST_F(GoingOnTest, StandbyThatStartsAgainTakesOnlyWhatItMissed) {
  for (const char* codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    for (const v1::DurabilityLevel level : {v1::DURABILITY_FSYNC, v1::DURABILITY_INTERVAL}) {
      SCOPED_TRACE(absl::StrCat(codec, " level ", level));
      const v1::JobSpec spec = Spec(codec, level);
      const std::string expected = Undisturbed(spec, 12);
      StartPair();
      StartWorkers(spec);
      ASSERT_TRUE(Eventually([&] { return InSync(); }));
      uint64_t round = 0;
      for (; round < 3; ++round) Step(round);
      for (int again = 0; again < 3; ++again) {
        standby_.daemon.reset();
        if (again != 1) Step(round++);
        if (again != 1) Step(round++);
        ComeBack();
        EXPECT_TRUE(GoneOn());
        Step(round++);
        ExpectSame();
      }
      ASSERT_EQ(round, 10u);
      primary_.daemon.reset();
      ASSERT_EQ(PromoteInSync().status(), absl::OkStatus());
      ResumeBoth(standby_, round);
      for (; round < 12; ++round) Step(round);
      EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
      a_.reset();
      b_.reset();
      standby_.daemon.reset();
      std::filesystem::remove_all(root_ + "/primary");
      std::filesystem::remove_all(root_ + "/standby");
    }
  }
}

TEST_F(GoingOnTest, SoDoesOneWithASnapshot) {
  Begin(4);
  ASSERT_EQ(standby_.daemon->registry().RequestSnapshot("job"), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return Status(standby_).durability().snapshot_version() == 4; }));
  standby_.daemon.reset();
  Step(4);
  ComeBack();
  EXPECT_TRUE(GoneOn());
  Step(5);
  ExpectSame();
}

TEST_F(GoingOnTest, NotFromAPrimaryThatWasStartedAgain) {
  Begin(3);
  Mark();
  primary_.daemon.reset();
  Start(primary_);
  ResumeBoth(primary_, 3);
  Step(3);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_FALSE(GoneOn());
  Step(4);
  ExpectSame();
}

TEST_F(GoingOnTest, NotFromAJobThatWasMadeAnew) {
  Begin(3);
  standby_.daemon.reset();
  a_.reset();
  b_.reset();
  ASSERT_EQ(primary_.daemon->registry().Delete("job"), absl::OkStatus());
  StartWorkers(Spec());
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  ComeBack();
  EXPECT_FALSE(GoneOn());
  Step(3);
  ExpectSame();
}

TEST_F(GoingOnTest, NotByAServerThatWasPromotedMeanwhile) {
  Begin(3);
  standby_.daemon.reset();
  const std::string primary = std::exchange(standby_.follow, "inproc://nowhere");
  Start(standby_);
  ASSERT_EQ(standby_.daemon->replication().Promote(true).status(), absl::OkStatus());
  standby_.daemon.reset();
  // Somebody makes a standby of it again.
  std::ofstream(root_ + "/standby/ROLE") << "standby 0\n";
  standby_.follow = primary;
  ComeBack();
  EXPECT_FALSE(GoneOn());
  Step(3);
  ExpectSame();
}

TEST_F(GoingOnTest, OnlyFromWhatThePrimaryHasToo) {
  primary_.directory = "primary";
  Start(primary_);
  StartWorkers(Spec());
  Step(0);
  Step(1);
  v1::FollowCopy copy;
  copy.set_job("job");
  // The first standby: from its coming on, updates are kept.
  const Begun first = Open(copy, 2);
  EXPECT_FALSE(first.begin.goes_on());
  EXPECT_NE(first.begin.history(), 0u);
  copy.set_history(first.begin.history());
  for (uint64_t round = 2; round < 6; ++round) Step(round);
  // What the updates of rounds 2 to 5 are, from a stream that was given a state and all that came later.
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> digests;
  for (const journal::Record& record : Open(v1::FollowCopy(), 6).records) {
    if (record.type == journal::RecordType::kUpdate) digests[{record.bucket, record.round + 1}] = DigestOf(record);
  }
  ASSERT_EQ(digests.size(), 4u) << "the last two of each bucket";
  const auto set = [&](uint64_t zero, uint64_t one) {
    copy.clear_versions();
    copy.clear_digests();
    copy.add_versions(zero);
    copy.add_versions(one);
    copy.add_digests(digests[{0, zero}]);
    copy.add_digests(digests[{1, one}]);
  };
  set(5, 6);
  const Begun going_on = Open(copy, 1);
  EXPECT_TRUE(going_on.begin.goes_on());
  EXPECT_EQ(going_on.records[0].type, journal::RecordType::kUpdate);
  EXPECT_EQ(going_on.records[0].bucket, 0u);
  EXPECT_EQ(going_on.records[0].round, 5u);
  set(6, 6);
  EXPECT_TRUE(Open(copy, 0).begin.goes_on()) << "nothing was missed";
  set(5, 5);
  EXPECT_TRUE(Open(copy, 2).begin.goes_on());

  const auto whole = [&](const v1::FollowCopy& what) {
    const Begun begun = Open(what, 1);
    return !begun.begin.goes_on() && begun.records[0].type == journal::RecordType::kState;
  };
  copy.set_digests(1, copy.digests(1) ^ 1);
  EXPECT_TRUE(whole(copy)) << "another update";
  set(5, 5);
  copy.set_history(copy.history() + 1);
  EXPECT_TRUE(whole(copy)) << "another history";
  copy.set_history(first.begin.history());
  set(2, 2);
  EXPECT_TRUE(whole(copy)) << "from before the first standby";
  set(7, 6);
  EXPECT_TRUE(whole(copy)) << "a version that was never made";
  set(0, 0);
  EXPECT_TRUE(whole(copy)) << "no update at all";
  set(5, 5);
  copy.add_versions(5);
  copy.add_digests(0);
  EXPECT_TRUE(whole(copy)) << "another number of buckets";
  set(5, 5);
  copy.clear_digests();
  EXPECT_TRUE(whole(copy)) << "no digests";
  set(5, 5);
  copy.set_job("another");
  EXPECT_TRUE(whole(copy));
  Step(6);
}

}  // namespace
}  // namespace gradwire
