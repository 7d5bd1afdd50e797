// What a job writes before anyone sees it, and what two-way compression adds to records, snapshots and copies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "common/journal/record.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing_support::HoldingSink;
using testing_support::JobShardTest;
using testing_support::SetHoldingSink;
using testing_support::SmallSpec;
using testing_support::TestWorker;

TEST_F(JobShardTest, NothingIsSeenBeforeItsRecordIsWritten) {
  Start(SmallSpec("job", 2));
  HoldingSink& sink = SetHoldingSink(shard_->log());
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  b.Pull(v1::PULL_PARAMS_F32, 0);
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) a.PushUnanswered(a.frames.Initialize(bucket, 1.0f));
  EXPECT_TRUE(b.TakeAnswers().empty());
  EXPECT_TRUE(a.TakeAcks().empty());
  sink.Release();
  EXPECT_EQ(b.TakeAnswers().size(), b.frames.buckets());
  EXPECT_EQ(a.TakeAcks().size(), a.frames.buckets());
  PushAll(&a, 0, 1.0f);
  PushAll(&b, 0, 1.0f);
  a.Pull(v1::PULL_UPDATE, 1);
  b.Pull(v1::PULL_STATE, 1);
  EXPECT_TRUE(a.TakeAnswers().empty());
  EXPECT_TRUE(b.TakeAnswers().empty());
  EXPECT_EQ(shard_->Describe(false, false).version(), 0u);
  ASSERT_EQ(sink.held.size(), a.frames.buckets());
  sink.held.back()();  // of one bucket
  sink.held.pop_back();
  EXPECT_EQ(a.TakeAnswers().size(), 1u);
  EXPECT_EQ(shard_->Describe(false, false).version(), 0u);
  sink.Release();
  EXPECT_EQ(a.TakeAnswers().size(), a.frames.buckets() - 1);
  EXPECT_EQ(shard_->Describe(false, false).version(), 1u);
  // The record says whose frames it contains.
  const journal::Record& last = sink.records.back();
  ASSERT_EQ(last.contributions.size(), 2u);
  for (const journal::Contribution& c : last.contributions) {
    EXPECT_TRUE(c.included);
    EXPECT_EQ(c.member, MakeMemberId(c.worker, c.incarnation));
    EXPECT_NE(c.digest, 0u);
  }
}

// Any number of members may come, abstain and leave while a round is open; a record has room for so many.
TEST_F(JobShardTest, ARecordDoesNotNameThoseWhoAbstainedAndLeft) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  HoldingSink& sink = SetHoldingSink(shard_->log());
  for (uint32_t k = 0; k < b.frames.buckets(); ++k) b.Push(b.frames.Abstain(k, 1));
  ASSERT_TRUE(shard_->Leave(b.LeaveRequest()).ok());
  PushAll(&a, 1, 1.0f);
  ASSERT_EQ(sink.records.size(), a.frames.buckets());
  for (const journal::Record& record : sink.records) {
    ASSERT_EQ(record.contributions.size(), 1u);
    EXPECT_EQ(record.contributions[0].worker, "a");
  }
}

v1::JobSpec TwoWaySpec() {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.set_update_codec("topk:density=0.02,values=fp16");
  return spec;
}

// Everything that the shard has of a bucket, the residual of its update codec as well, and its last updates.
std::vector<Bytes> AllOf(JobShard& shard, uint32_t bucket) {
  const auto records = shard.log().CopyBucket(bucket);
  EXPECT_TRUE(records.ok()) << records.status();
  std::vector<Bytes> all;
  for (const journal::Record& record : *records) all.insert(all.end(), record.chunks.begin(), record.chunks.end());
  return all;
}

void ExpectSameBytes(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(std::ranges::equal(a[i].span(), b[i].span())) << "chunk " << i;
}

TEST_F(JobShardTest, UpdatesAreCompressedOnceAndASlowWorkerIsSentThoseOfItsRound) {
  Start(TwoWaySpec());
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 3.0f);
  a.Pull(v1::PULL_UPDATE, 2);
  const auto to_a = a.TakeAnswers();
  a.FollowUpdate(2);
  PushAll(&a, 2, 0.5f);  // the slow one has not asked for its update of round 1 yet
  b.Pull(v1::PULL_UPDATE, 2);
  const auto to_b = b.TakeAnswers();
  b.FollowUpdate(2);
  PushAll(&b, 2, 0.5f);
  b.Pull(v1::PULL_UPDATE, 2);
  const auto again = b.TakeAnswers();
  ASSERT_EQ(to_a.size(), a.frames.buckets());
  for (size_t k = 0; k < to_a.size(); ++k) {
    EXPECT_EQ(to_a[k].chunks[0].data(), to_b[k].chunks[0].data());  // not even copied
    EXPECT_EQ(to_a[k].chunks[0].data(), again[k].chunks[0].data());
    const BucketLayout& layout = a.frames.at(to_a[k].control.bucket());
    const auto update = DecodeUpdate(to_a[k].chunks, a.frames.job(), layout, {});
    ASSERT_TRUE(update.ok()) << update.status();
    EXPECT_EQ(update->body, Update::Body::kSparseFloat);
    EXPECT_GT(update->positions.size(), 0u);
    EXPECT_LT(update->positions.size(), layout.elements / 25);  // of all, which the workers sent
  }
  EXPECT_EQ(shard_->Describe(true, false).version(), 3u);
}

TEST_F(JobShardTest, TheResidualOfTheUpdateCodecIsInRecordsSnapshotsAndCopies) {
  Start(TwoWaySpec());
  HoldingSink& sink = SetHoldingSink(shard_->log());
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) a.PushUnanswered(a.frames.Initialize(bucket, 1.0f));
  sink.Release();
  a.TakeAcks();
  const auto round = [&](uint64_t r) {
    PushAll(&a, r, 0.5f + static_cast<float>(r));
    PushAll(&b, r, 1.5f);
    sink.Release();
    a.FollowUpdate(r + 1);
    b.FollowUpdate(r + 1);
  };
  for (uint64_t r = 0; r < 4; ++r) round(r);
  const auto capture = *shard_->snapshots().NewCopy();
  ASSERT_EQ(shard_->snapshots().Gather(capture, absl::Seconds(1)), absl::OkStatus());
  const ShardState snapshot = capture->state;
  EXPECT_EQ(snapshot.version, 4u);
  for (const ShardState::Bucket& bucket : snapshot.buckets) {
    EXPECT_THAT(bucket.update_residual, testing::Contains(testing::Ne(0.0f)));
  }
  for (uint64_t r = 4; r < 7; ++r) round(r);
  const auto read = [&sink](const Recovery::RecordVisitor& visit) -> absl::Status {
    for (const journal::Record& record : sink.records) {
      // As it comes back from a file.
      const journal::EncodedRecord encoded = journal::EncodeRecord(record, 1, 0);
      std::vector<uint8_t> bytes;
      for (const auto piece : encoded.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
      const auto header = journal::DecodeRecordHeader(std::span(bytes).first(journal::kRecordHeaderBytes));
      if (!header.ok()) return header.status();
      const Bytes all = Bytes::FromVector(bytes);
      auto decoded = journal::DecodeRecordBody(
          *header, all.Slice(journal::kRecordHeaderBytes, bytes.size() - journal::kRecordHeaderBytes));
      if (!decoded.ok()) return decoded.status();
      if (const absl::Status status = visit(*std::move(decoded)); !status.ok()) return status;
    }
    return absl::OkStatus();
  };
  const ShardState* const none = nullptr;
  for (const ShardState* from : {none, &snapshot}) {
    SCOPED_TRACE(from == nullptr ? "from the journal" : "from the snapshot");
    const auto recovered = JobShard::Make(spec_, 0, 1, environment_);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    const absl::Status status = (*recovered)->recovery().Recover(from, read);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ((*recovered)->Describe(false, true).parameters_sha256(), Digest());
    for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) {
      ExpectSameBytes(AllOf(**recovered, bucket), AllOf(*shard_, bucket));
    }
  }
  // A standby that begins with the copies has the same.
  const auto standby = JobShard::Make(spec_, 0, 1, environment_);
  ASSERT_TRUE(standby.ok()) << standby.status();
  const absl::Status copied = (*standby)->recovery().Recover(none, [&](const Recovery::RecordVisitor& visit) {
    absl::Status status;
    for (uint32_t bucket = 0; bucket < a.frames.buckets() && status.ok(); ++bucket) {
      const auto records = shard_->log().CopyBucket(bucket);
      if (!records.ok()) return records.status();
      for (const journal::Record& record : *records) status.Update(visit(record));
    }
    return status;
  });
  ASSERT_TRUE(copied.ok()) << copied;
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) {
    ExpectSameBytes(AllOf(**standby, bucket), AllOf(*shard_, bucket));
  }
}

}  // namespace
}  // namespace gradwire
