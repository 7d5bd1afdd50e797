// What is there is told, what is damaged is found and named, and nothing is changed.
#include "common/recovery/verify.h"

#include <gmock/gmock.h>

#include "common/base/sha256.h"
#include "common/recovery/reach.h"
#include "tests/unit/common/recovery/trained_job.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FakeDisk;
using testing_support::TrainedJob;
using testing_support::TrainedSpec;

class VerifyTest : public testing::Test {
 protected:
  VerifyTest() : job_(TrainedSpec("tagc:density=0.05", v1::OPTIMIZER_ADAMW)) {
    job_.Begin(&disk_, "/data", 2);
    job_.Rounds(4);
    job_.Snapshot(0);
    job_.Rounds(2);
    job_.Snapshot(0);
    job_.Rounds(3);
  }
  DirectoryReport Verify(const std::string& path = "/data/0") {
    const uint64_t calls = disk_.calls();
    auto report = VerifyDirectory(disk_, path, job_.backend());
    EXPECT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(disk_.calls(), calls) << "something was written";
    return *std::move(report);
  }
  static std::string Snapshot(uint64_t version) { return SnapshotPath("/data/0/jobs/job.job/snapshots", version); }
  static std::string Segment(uint64_t sequence) {
    return journal::SegmentPath("/data/0/jobs/job.job/journal", sequence);
  }

  FakeDisk disk_;
  TrainedJob job_;
};

TEST_F(VerifyTest, TellsWhatIsThere) {
  const DirectoryReport report = Verify();
  EXPECT_FALSE(report.damaged());
  EXPECT_EQ(report.epoch, 1u);
  ASSERT_EQ(report.shards.size(), 1u);
  const ShardReport& shard = report.shards[0];
  EXPECT_EQ(shard.job, "job");
  EXPECT_EQ(shard.shards, 2u);
  EXPECT_EQ(shard.version, 9u);
  EXPECT_EQ(shard.newest, 9u);
  EXPECT_FALSE(shard.refused);
  ASSERT_EQ(shard.snapshots.size(), 2u);
  EXPECT_EQ(shard.snapshots[0].version, 4u);
  EXPECT_EQ(shard.snapshots[0].recoverable_to, 9u);
  EXPECT_EQ(shard.oldest_round, 0u);
  Sha256 sha;
  for (const auto& bucket : job_.state(0).buckets) sha.Update(std::span<const float>(bucket.parameter));
  EXPECT_EQ(shard.parameters_sha256, sha.Hex());
  EXPECT_FALSE(Verify("/data/1").damaged());
  EXPECT_EQ(VerifyDirectory(disk_, "/data", job_.backend()).status().code(), absl::StatusCode::kNotFound);
}

// As on a standby that was away: what it lacked came as the state of every bucket.
TEST_F(VerifyTest, AStateInTheJournalGoesOnFromSnapshotsBeforeIt) {
  job_.JournalState(&disk_, 0);
  job_.Rounds(1);
  job_.Snapshot(0);
  job_.Rounds(1);
  const DirectoryReport report = Verify();
  EXPECT_FALSE(report.damaged());
  EXPECT_EQ(report.shards[0].version, 11u);
  for (const SnapshotReport& snapshot : report.shards[0].snapshots) EXPECT_EQ(snapshot.recoverable_to, 11u);
}

// As with asynchronous rounds.
TEST(JournalReach, BeginsWithEachBucketWhereItIs) {
  JournalReach reach(2);
  for (uint64_t round = 5; round < 9; ++round) {
    for (const uint32_t bucket : {0u, 1u}) {
      journal::Record record;
      record.bucket = bucket;
      record.round = round + 4 * bucket;
      reach.Note(record);
    }
  }
  EXPECT_EQ(reach.ReplayedFrom({6, 9}), 9u);
  EXPECT_EQ(reach.ReplayedFrom({6, 13}), 9u);
  EXPECT_EQ(reach.ReplayedFrom({6, 6}), 6u) << "records are missing";
}

TEST_F(VerifyTest, ShardsOfOneJobAreCompared) {
  const std::vector<DirectoryReport> good = {Verify("/data/0"), Verify("/data/1")};
  const auto damaged = [&good](uint64_t version, bool in_use) {
    std::vector<DirectoryReport> reports = good;
    reports[1].shards[0].version = version;
    reports[1].in_use = in_use;
    CompareShards(&reports);
    EXPECT_FALSE(reports[0].damaged());
    return reports[1].damaged();
  };
  EXPECT_FALSE(damaged(9, false));
  EXPECT_FALSE(damaged(8, false)) << "in the middle of a round";
  EXPECT_TRUE(damaged(7, false));
  EXPECT_FALSE(damaged(7, true));
}

TEST_F(VerifyTest, EveryFlippedBitIsFoundAndItsFileNamed) {
  std::mt19937 random(1);
  uint64_t flips = 0;
  for (const std::string& file : disk_.Files()) {
    // People may edit the epoch without harm, as long as it is a number.
    if (!file.starts_with("/data/0/jobs")) continue;
    const uint64_t named =
        file.ends_with("manifest.json") ? 8 * sizeof("{\n  \"manifest_sha256\"") : 0;  // see SNAPSHOT.md
    for (int i = 0; i < 4; ++i, ++flips) {
      const uint64_t bit = named + random() % (disk_.SizeOf(file) * 8 - named);
      disk_.FlipBit(file, bit);
      const DirectoryReport report = Verify();
      EXPECT_TRUE(report.damaged() || report.shards[0].torn_bytes > 0) << file << " bit " << bit;
      if (report.damaged()) {
        EXPECT_THAT(report.shards[0].damage[0].path + report.shards[0].damage[0].what, HasSubstr(file));
      }
      disk_.FlipBit(file, bit);
    }
  }
  EXPECT_GT(flips, 20u);
  EXPECT_FALSE(Verify().damaged());
}

TEST_F(VerifyTest, DamageInTheJournalSaysWhatIsLost) {
  ASSERT_TRUE(job_.Snapshots(0).RemoveOld(1).ok());  // 6 stays
  uint64_t sequence = 1;
  while (!disk_.Files().empty() && disk_.Open(Segment(sequence + 2)).ok()) ++sequence;
  disk_.FlipBit(Segment(sequence), disk_.SizeOf(Segment(sequence)) * 8 - 200);
  const ShardReport shard = Verify().shards[0];
  EXPECT_TRUE(shard.refused);
  EXPECT_EQ(shard.newest, 9u);
  EXPECT_GE(shard.version, 6u);
  ASSERT_FALSE(shard.damage.empty());
  EXPECT_EQ(shard.damage[0].path, Segment(sequence));
  EXPECT_GT(shard.damage[0].offset, 0u);
}

TEST_F(VerifyTest, DamagedSnapshotIsCoveredByTheOneBefore) {
  disk_.FlipBit(Snapshot(6) + "/parameters.safetensors", 50'000);
  const ShardReport shard = Verify().shards[0];
  EXPECT_EQ(shard.damage.size(), 1u);
  EXPECT_EQ(shard.snapshots[1].status.code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(shard.refused);
  EXPECT_EQ(shard.version, 9u);
}

TEST_F(VerifyTest, MissingSegmentsLeaveSnapshotsWithoutTheirJournal) {
  ASSERT_TRUE(disk_.Remove(Segment(1)).ok());  // initial parameters and the first rounds: snapshots make up for it
  EXPECT_FALSE(Verify().damaged());
  uint64_t sequence = 2;
  while (disk_.Open(Segment(sequence + 1)).ok()) ASSERT_TRUE(disk_.Remove(Segment(sequence++)).ok());
  const ShardReport shard = Verify().shards[0];
  EXPECT_FALSE(shard.damage.empty());
}

TEST_F(VerifyTest, DamagedJobFileIsReplacedByTheManifestOfASnapshot) {
  disk_.FlipBit("/data/0/jobs/job.job/job", 100);
  const ShardReport shard = Verify().shards[0];
  EXPECT_TRUE(shard.refused);
  EXPECT_EQ(shard.version, 9u);
  ASSERT_EQ(shard.damage.size(), 1u);
  EXPECT_EQ(shard.damage[0].path, "/data/0/jobs/job.job/job");
}

TEST_F(VerifyTest, UnfinishedWriteAndLeftoversAreNoDamage) {
  std::mt19937 random(2);
  ASSERT_TRUE(disk_.CreateDirectory("/data/0/jobs/half.job.new").ok());
  uint64_t last = 1;
  while (disk_.Open(Segment(last + 1)).ok()) ++last;
  ASSERT_TRUE(disk_.Truncate(Segment(last), disk_.SizeOf(Segment(last)) - 8).ok());
  const DirectoryReport report = Verify();
  EXPECT_FALSE(report.damaged());
  EXPECT_EQ(report.leftovers, std::vector<std::string>{"half.job.new"});
  EXPECT_GT(report.shards[0].torn_bytes, 0u);
  EXPECT_EQ(report.shards[0].version, 8u);
}

}  // namespace
}  // namespace gradwire
