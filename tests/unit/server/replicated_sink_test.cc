// What a ReplicatedSink keeps for a standby that comes back, and how it goes on.
#include "server/replication/replicated_sink.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

namespace gradwire {
namespace {

constexpr uint64_t kHistory = 77;

// Says at once that a record is written.
class NullJournal final : public UpdateSink {
 public:
  void Append(journal::Record, std::function<void()> visible) override { visible(); }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}
};

class Standby final : public RecordFollower {
 public:
  const std::string& name() const override { return name_; }
  void Enqueue(const journal::Record& record) override { rounds.push_back({record.bucket, record.round}); }
  bool MayBeWaitedFor() const override { return may_be_waited_for; }
  bool may_be_waited_for = true;
  std::vector<std::pair<uint32_t, uint64_t>> rounds;

 private:
  const std::string name_ = "standby";
};

class ReplicatedSinkTest : public testing::Test {
 protected:
  ReplicatedSinkTest()
      : sink_(std::make_unique<NullJournal>(), &clock_,
              {.serve_until = &serve_until_, .changed = [] {}, .lost_sync = {}, .history = kHistory}) {}

  static journal::Record Update(uint32_t bucket, uint64_t round, Bytes chunk) {
    return {journal::RecordType::kUpdate, bucket, round, {}, {std::move(chunk)}};
  }
  static Bytes Chunk(uint64_t round) { return Bytes::FromVector({static_cast<uint8_t>(round)}); }
  void Append(uint32_t bucket, uint64_t round) {
    sink_.Append(Update(bucket, round, Chunk(round)), [this] { ++visible_; });
  }
  // The position behind `round`.
  static CopyPosition Behind(uint32_t bucket, uint64_t round) {
    return {round + 1, DigestOf(Update(bucket, round, Chunk(round)))};
  }

  SteadyClock clock_;
  std::atomic<TimeNs> serve_until_{std::numeric_limits<TimeNs>::max()};
  int visible_ = 0;
  ReplicatedSink sink_;
  Standby first_, again_;
};

// With a lease: rounds wait until whoever was lost cannot take over any more.
TEST(ReplicatedSinkLosses, AreForgivenByNumber) {
  SteadyClock clock;
  const std::atomic<TimeNs> serve_until = std::numeric_limits<TimeNs>::max();
  int calls = 0, visible = 0;
  ReplicatedSink sink(std::make_unique<NullJournal>(), &clock,
                      {.serve_until = &serve_until, .changed = [] {}, .lost_sync = [&] { ++calls; }, .history = 7});
  const auto append = [&](uint64_t round) {
    sink.Append({journal::RecordType::kUpdate, 0, round, {}, {Bytes::FromVector({1})}}, [&] { ++visible; });
  };
  append(0);
  EXPECT_EQ(visible, 0) << "a standby without any job may hold itself for in sync";
  EXPECT_EQ(calls, 1);
  sink.Forgive(sink.losses());
  EXPECT_EQ(visible, 1);
  append(1);
  EXPECT_EQ(visible, 2);
  Standby one, two;
  for (Standby* standby : {&one, &two}) {
    sink.Attach(standby);
    sink.GiveState(standby, 0, 2);
    sink.StatesGiven(standby);
    ASSERT_TRUE(*sink.Take(standby, 0, 2));
  }
  sink.Detach(&one);
  const uint64_t known = sink.losses();
  sink.Detach(&two);
  append(2);
  sink.Forgive(known);
  EXPECT_EQ(visible, 2) << "the second loss came behind what was announced";
  sink.Forgive(sink.losses());
  EXPECT_EQ(visible, 3);
  EXPECT_EQ(calls, 3);
}

TEST(ReplicatedSinkLosses, AreNoneOnAStandbyNorWhereTheNewTermHasTheJob) {
  for (const bool has_parameters : {false, true}) {
    SteadyClock clock;
    const std::atomic<TimeNs> serve_until = std::numeric_limits<TimeNs>::max();
    int calls = 0;
    ReplicatedSink sink(std::make_unique<NullJournal>(), &clock,
                        {&serve_until, [] {}, [&] { ++calls; }, /*history=*/7, /*following=*/true});
    const auto append = [&](uint64_t round) {
      sink.Append({journal::RecordType::kUpdate, 0, round, {}, {Bytes::FromVector({1})}}, [] {});
    };
    append(0);
    EXPECT_EQ(calls, 0);
    sink.Serve(has_parameters);
    append(1);
    append(2);
    EXPECT_EQ(calls, has_parameters ? 0 : 1);
  }
}

TEST_F(ReplicatedSinkTest, GivesWhatFollowsThePositionsInOrder) {
  Append(0, 0);
  Append(1, 0);
  sink_.Attach(&first_);
  for (uint64_t round = 1; round < 5; ++round) {
    Append(0, round);
    Append(1, round);
  }
  sink_.Detach(&first_);
  Append(0, 5);
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {Behind(0, 0), Behind(1, 2)})) << "from before the first standby";
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {Behind(0, 2)}));
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {}));
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory + 1, {Behind(0, 2), Behind(1, 2)}));
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {Behind(0, 2), Behind(0, 2)})) << "the digest is of another record";
  EXPECT_TRUE(again_.rounds.empty());
  ASSERT_TRUE(sink_.GoOn(&again_, kHistory, {Behind(0, 3), Behind(1, 2)}));
  const std::vector<std::pair<uint32_t, uint64_t>> expected = {{1, 3}, {0, 4}, {1, 4}, {0, 5}};
  EXPECT_EQ(again_.rounds, expected);
  Append(1, 5);
  EXPECT_EQ(again_.rounds.size(), 5u) << "it is attached";
}

TEST_F(ReplicatedSinkTest, IsInSyncOnlyWithWhatItSaysItHasTaken) {
  sink_.Attach(&first_);
  Append(0, 0);
  Append(0, 1);
  sink_.Detach(&first_);
  ASSERT_TRUE(sink_.GoOn(&again_, kHistory, {Behind(0, 0)}));
  EXPECT_FALSE(sink_.InSync(&again_));
  EXPECT_FALSE(*sink_.Take(&again_, 0, 1)) << "version 2 was seen";
  EXPECT_EQ(visible_, 2);
  Append(0, 2);
  EXPECT_EQ(visible_, 2) << "from here on it is waited for";
  EXPECT_TRUE(*sink_.Take(&again_, 0, 2));
  EXPECT_TRUE(sink_.InSync(&again_));
  EXPECT_EQ(visible_, 2);
  EXPECT_EQ(sink_.Take(&again_, 0, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(sink_.Take(&again_, 0, 3).ok());
  EXPECT_EQ(visible_, 3);
}

TEST_F(ReplicatedSinkTest, WaitsForNobodyThatHasTakenNothing) {
  sink_.Attach(&first_);
  sink_.GiveState(&first_, 0, 0);
  sink_.StatesGiven(&first_);
  Append(0, 0);
  EXPECT_EQ(visible_, 1);
  EXPECT_FALSE(sink_.WaitedFor(&first_));
}

TEST_F(ReplicatedSinkTest, WaitsForNobodyBeforeItMayAndIsAskedAgain) {
  first_.may_be_waited_for = false;
  sink_.Attach(&first_);
  sink_.GiveState(&first_, 0, 0);
  sink_.StatesGiven(&first_);
  EXPECT_FALSE(*sink_.Take(&first_, 0, 0));
  Append(0, 0);
  EXPECT_EQ(visible_, 1);
  EXPECT_FALSE(*sink_.Take(&first_, 0, 1)) << "it has all, and may not";
  EXPECT_FALSE(sink_.Reconsider(&first_));
  EXPECT_FALSE(sink_.WaitedFor(&first_));
  first_.may_be_waited_for = true;
  EXPECT_TRUE(sink_.Reconsider(&first_));
  EXPECT_FALSE(sink_.Reconsider(&first_)) << "once";
  EXPECT_TRUE(sink_.WaitedFor(&first_));
  EXPECT_EQ(sink_.WaitingSince(&first_), std::nullopt);
  const TimeNs before = clock_.Now();
  Append(0, 1);
  EXPECT_EQ(visible_, 1);
  EXPECT_GE(sink_.WaitingSince(&first_).value_or(0), before);
  sink_.Detach(&first_);
  EXPECT_EQ(visible_, 2);
}

TEST_F(ReplicatedSinkTest, KeepsSoManyBytesAndNoMore) {
  sink_.Attach(&first_);
  const Bytes large = Bytes::FromVector(std::vector<uint8_t>(1 << 20));
  const uint64_t kept = ReplicatedSink::kRecentBytes >> 20;
  for (uint64_t round = 0; round < 2 * kept; ++round) sink_.Append(Update(0, round, large), [] {});
  const auto behind = [&](uint64_t round) { return CopyPosition{round + 1, DigestOf(Update(0, round, large))}; };
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {behind(kept - 1)}));
  EXPECT_TRUE(again_.rounds.empty());
  EXPECT_TRUE(sink_.GoOn(&again_, kHistory, {behind(kept + 1)}));
  EXPECT_EQ(again_.rounds.size(), kept - 2);
}

TEST_F(ReplicatedSinkTest, FencedItGoesOnWithNobody) {
  sink_.Attach(&first_);
  Append(0, 0);
  sink_.Fence();
  EXPECT_FALSE(sink_.GoOn(&again_, kHistory, {Behind(0, 0)}));
}

}  // namespace
}  // namespace gradwire
