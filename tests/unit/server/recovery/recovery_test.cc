#include "server/recovery/recovery.h"

#include <gtest/gtest.h>

#include "server/job/parameter_digest.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::HoldingSink;
using testing_support::LoggedJob;
using testing_support::SmallSpec;
using testing_support::TestMember;

// A job with all that recovery needs of it.
struct Shard {
  explicit Shard(const v1::JobSpec& spec) : job(spec) {}
  // The round's frame of the only worker, in every bucket.
  void Round(TestMember& member, uint64_t round) {
    for (uint32_t b = 0; b < job.frames().buckets(); ++b) {
      job.decided.close.clear();
      job.Merge(member, b, round, 1.0f);
      stages.Pass(job.Closed(b));
      std::vector<Bytes> update;
      {
        absl::MutexLock lock(&job.bucket(b).mu);
        update = job.bucket(b).updates.back().frame->pieces();
      }
      ASSERT_TRUE(job.frames().Follow(b, update).ok());
    }
  }
  std::string Digest() { return *ParameterDigest(&job.parts()).Get(); }

  LoggedJob job;
  HoldingSink& sink = testing_support::SetHoldingSink(job.log);
  const ByRounds& by = job.by_rounds();
  Stages stages{&job.parts(), by.flow.get(), by.past.get(), &job.snapshots, &job.log, &job.desk};
  Recovery recovery{&job.parts(), by.flow.get(), by.past.get(), &job.snapshots, &job.log, &stages};
};

class RecoveryTest : public testing::Test {
 protected:
  RecoveryTest() {
    member_ = before_.job.Join("a");
    for (uint32_t b = 0; b < before_.job.frames().buckets(); ++b) {
      records_.push_back({journal::RecordType::kInitial, b, 0, {}, before_.job.frames().Initialize(b, 1.0f)});
    }
    before_.job.Initialize(*member_, 1.0f);
    for (uint64_t round = 0; round < 3; ++round) before_.Round(*member_, round);
    for (const journal::Record& record : before_.sink.records) records_.push_back(record);
  }
  Recovery::ReadRecords Read(size_t skipped = SIZE_MAX) const {
    return [this, skipped](const Recovery::RecordVisitor& visit) -> absl::Status {
      for (size_t i = 0; i < records_.size(); ++i) {
        if (i == skipped) continue;
        const absl::Status status = visit(records_[i]);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    };
  }

  // A snapshot of version 3, and two rounds behind it. The journal has given up the rounds in [from, to).
  std::shared_ptr<ShardCapture> GoOnWithoutRecordsOf(uint64_t from, uint64_t to) {
    std::shared_ptr<ShardCapture> snapshot = *before_.job.snapshots.NewCopy();
    for (const auto& visible : before_.sink.held) visible();
    EXPECT_TRUE(before_.job.snapshots.Gather(snapshot, absl::Seconds(10)).ok());
    const size_t seen = before_.sink.records.size();
    for (uint64_t round = 3; round < 5; ++round) before_.Round(*member_, round);
    records_.insert(records_.end(), before_.sink.records.begin() + static_cast<std::ptrdiff_t>(seen),
                    before_.sink.records.end());
    std::erase_if(records_, [=](const journal::Record& record) {
      return record.type == journal::RecordType::kUpdate && record.round >= from && record.round < to;
    });
    return snapshot;
  }

  Shard before_{SmallSpec("job", 1)};
  std::unique_ptr<TestMember> member_;
  std::vector<journal::Record> records_;
};

TEST_F(RecoveryTest, RecordsMakeTheSameShardAgain) {
  Shard after(SmallSpec("job", 1));
  ASSERT_EQ(after.recovery.Recover(nullptr, Read()), absl::OkStatus());
  EXPECT_EQ(after.recovery.version(), 3u);
  EXPECT_EQ(after.job.parts().NewestVersion(), 3u);
  EXPECT_FALSE(after.job.parts().replaying);
  EXPECT_EQ(after.Digest(), before_.Digest());
  absl::MutexLock lock(&after.job.parts().mu);
  EXPECT_TRUE(after.job.parts().rounds->initialized());
  EXPECT_EQ(after.job.parts().rounds->round(), 3u);
  // Who is in the last round is waited for, and what it sends again is known.
  EXPECT_EQ(after.job.parts().rounds->membership().members().size(), 1u);
  EXPECT_EQ(*after.job.parts().rounds->Classify(MakeMemberId("a", 1), 0, 2), PushVerdict::kDuplicate);
}

TEST_F(RecoveryTest, ARecordThatIsMissingIsNoticed) {
  Shard after(SmallSpec("job", 1));
  const size_t first_update = before_.job.frames().buckets();
  EXPECT_EQ(after.recovery.Recover(nullptr, Read(first_update)).code(), absl::StatusCode::kDataLoss);
}

struct Missing {
  uint64_t from, to;  // records of these rounds, before the snapshot
  size_t kept;        // updates behind them, of those that are retained
};
class MissingRecordsTest : public RecoveryTest, public testing::WithParamInterface<Missing> {};

// The snapshot made good what they did.
TEST_P(MissingRecordsTest, WhatTheyToldIsNotKnown) {
  const Missing missing = GetParam();
  const auto snapshot = GoOnWithoutRecordsOf(missing.from, missing.to);
  Shard after(SmallSpec("job", 1));
  ASSERT_EQ(after.recovery.Recover(&snapshot->state, Read()), absl::OkStatus());
  EXPECT_EQ(after.Digest(), before_.Digest());
  {
    absl::MutexLock lock(&after.job.bucket(0).mu);
    EXPECT_EQ(after.job.bucket(0).updates.size(), missing.kept);
    EXPECT_EQ(after.job.bucket(0).UpdateOf(missing.to - 1), nullptr);
    EXPECT_EQ(after.job.bucket(0).owed_from, missing.to + 1) << "whether they were skipped is not known";
  }
  absl::MutexLock lock(&after.job.parts().mu);
  const Rounds& rounds = *after.job.parts().rounds;
  EXPECT_EQ(rounds.Classify(member_->id, 0, missing.to - 1).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*rounds.Classify(member_->id, 0, 3), PushVerdict::kDuplicate);
  EXPECT_EQ(*rounds.Classify(member_->id, 0, 4), PushVerdict::kDuplicate);
  EXPECT_EQ(*rounds.Classify(member_->id, 0, 5), PushVerdict::kAccept);
}

INSTANTIATE_TEST_SUITE_P(Rounds, MissingRecordsTest,
                         testing::Values(Missing{1, 2, 2}, Missing{1, 3, 2}, Missing{0, 3, 2}));

TEST_F(RecoveryTest, WithoutRecordsWorkersUploadAgain) {
  Shard after(SmallSpec("job", 1));
  ASSERT_TRUE(after.recovery.Recover(nullptr, [](const auto&) { return absl::OkStatus(); }).ok());
  absl::MutexLock lock(&after.job.parts().mu);
  EXPECT_FALSE(after.job.parts().rounds->initialized());
}

TEST_F(RecoveryTest, AStandbyFollowsAndSaysWhenARecordIsSafe) {
  Shard standby(SmallSpec("job", 1));
  ASSERT_TRUE(standby.recovery.Begin(nullptr, [](const auto&) { return absl::OkStatus(); }).ok());
  int safe = 0;
  for (const journal::Record& record : records_) {
    ASSERT_EQ(standby.recovery.Follow(record, [&safe] { ++safe; }), absl::OkStatus());
  }
  EXPECT_EQ(standby.sink.records.size(), records_.size());
  EXPECT_EQ(safe, 0);
  EXPECT_EQ(standby.job.log.SafeVersions()[0], 0u);
  for (const auto& visible : standby.sink.held) visible();
  EXPECT_EQ(safe, static_cast<int>(records_.size()));
  EXPECT_EQ(standby.job.log.SafeVersions()[0], 3u);
  const std::vector<CopyPosition> positions = standby.recovery.Positions();
  ASSERT_EQ(positions.size(), standby.job.frames().buckets());
  EXPECT_EQ(positions[0].version, 3u);
  ASSERT_EQ(standby.recovery.End(), absl::OkStatus());
  EXPECT_EQ(standby.Digest(), before_.Digest());
}

// Its buckets are at versions of their own: one that has not come looks like one that nobody has trained yet.
TEST(AsyncStandby, TakesNoSnapshotBeforeAllBucketsAreHere) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  spec.mutable_rounds()->set_staleness(3);
  Shard primary(spec);
  primary.sink.holds = false;
  const auto member = primary.job.Join("a");
  primary.job.Initialize(*member, 1.0f);
  const uint32_t buckets = primary.job.frames().buckets();
  ASSERT_GT(buckets, 1u);
  for (uint32_t b = 0; b < buckets; ++b) {
    primary.job.decided.close.clear();
    primary.job.Merge(*member, b, 0, 1.0f);
    primary.stages.Pass(primary.job.Closed(b));
  }
  Shard standby(spec);
  standby.sink.holds = false;
  ASSERT_TRUE(standby.recovery.Begin(nullptr, [](const auto&) { return absl::OkStatus(); }).ok());
  const auto take = [&standby](ShardState* state) {
    const std::shared_ptr<ShardCapture> copy = *standby.job.snapshots.NewCopy();
    const absl::Status taken = standby.job.snapshots.Gather(copy, absl::Seconds(10));
    *state = std::move(copy->state);
    return taken;
  };
  ShardState state;
  for (uint32_t b = 0; b < buckets; ++b) {
    EXPECT_EQ(take(&state).code(), absl::StatusCode::kFailedPrecondition) << b;
    BucketState& bucket = primary.job.bucket(b);
    std::vector<journal::Record> records;
    {
      absl::MutexLock lock(&bucket.mu);
      records = primary.by.past->CopyOf(bucket);
    }
    for (journal::Record& record : records) ASSERT_EQ(standby.recovery.Follow(record, [] {}), absl::OkStatus());
  }
  ASSERT_EQ(take(&state), absl::OkStatus());
  EXPECT_EQ(state.version, 1u);
  for (const ShardState::Bucket& bucket : state.buckets) EXPECT_NE(bucket.parameter[0], 0.0f);
}

}  // namespace
}  // namespace gradwire
