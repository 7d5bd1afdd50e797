#include "server/flow/initial_upload.h"

#include <gtest/gtest.h>

#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::HoldingSink;
using testing_support::LaterStreamOf;
using testing_support::LoggedJob;
using testing_support::SmallSpec;
using testing_support::TestMember;

class InitialUploadTest : public testing::Test {
 protected:
  // What the last chunk is answered with.
  InitialUpload::Taken Upload(TestMember& member, uint32_t bucket, float value) {
    InitialUpload::Taken taken = std::optional<PushVerdict>();
    std::vector<uint8_t> scratch;
    for (const Bytes& bytes : job_.frames().Initialize(bucket, value)) {
      const auto chunk = wire::ParseReceived({&bytes, 1}, &scratch);
      EXPECT_TRUE(chunk.ok()) << chunk.status();
      taken = upload_.Take(member.stream, *chunk, {&bytes, 1});
      if (!taken.ok()) return taken;
    }
    return taken;
  }

  LoggedJob job_{SmallSpec("job", 1)};
  HoldingSink& sink_ = testing_support::SetHoldingSink(job_.log);
  InitialUpload upload_{&job_.parts(), &job_.log, &job_.desk};
  const std::unique_ptr<TestMember> member_ = job_.Join("a");
};

TEST_F(InitialUploadTest, IsAcknowledgedWhenItsRecordIsSafeAndVersionZeroIsThereWithTheLast) {
  const uint32_t buckets = job_.frames().buckets();
  for (uint32_t b = 0; b < buckets; ++b) EXPECT_EQ(*Upload(*member_, b, 1.0f), std::nullopt);
  ASSERT_EQ(sink_.records.size(), buckets);
  EXPECT_EQ(sink_.records[0].type, journal::RecordType::kInitial);
  for (uint32_t b = 0; b < buckets; ++b) {
    {
      absl::MutexLock lock(&job_.bucket(0).mu);
      EXPECT_FALSE(job_.bucket(0).ready);
    }
    EXPECT_EQ(member_->received->sent.size(), b);
    sink_.held[b]();
  }
  EXPECT_EQ(member_->received->sent.size(), buckets);
  absl::MutexLock lock(&job_.bucket(0).mu);
  EXPECT_TRUE(job_.bucket(0).ready);
  EXPECT_EQ(job_.parts().in_flight.bytes(), 0u);
}

TEST_F(InitialUploadTest, ARepeatMustBeTheSame) {
  EXPECT_TRUE(Upload(*member_, 0, 1.0f).ok());
  EXPECT_EQ(*Upload(*member_, 0, 1.0f), std::nullopt) << "acknowledged with the first one";
  sink_.held[0]();
  EXPECT_EQ(member_->received->sent.size(), 1u);
  EXPECT_EQ(*Upload(*member_, 0, 1.0f), PushVerdict::kDuplicate);
  EXPECT_EQ(Upload(*member_, 0, 2.0f).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(sink_.records.size(), 1u);
}

TEST_F(InitialUploadTest, OnlyTheChosenWorkerUploads) {
  const auto other = job_.Join("b", 2);
  EXPECT_EQ(Upload(*other, 0, 1.0f).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Upload(*member_, 0, 1.0f).ok());
}

TEST_F(InitialUploadTest, WhatOthersSendLeavesAnUploadThatIsUnderWay) {
  const auto other = job_.Join("b", 2);
  const std::vector<Bytes> chunks = job_.frames().Initialize(0, 1.0f);
  std::vector<uint8_t> scratch;
  auto chunk = wire::ParseReceived({&chunks[0], 1}, &scratch);
  ASSERT_TRUE(chunk.ok());
  chunk->header.flags &= static_cast<uint16_t>(~wire::kLastChunk);
  EXPECT_EQ(*upload_.Take(member_->stream, *chunk, {&chunks[0], 1}), std::nullopt);
  const uint64_t held = job_.parts().in_flight.bytes();
  EXPECT_GT(held, 0u);
  EXPECT_EQ(Upload(*other, 0, 2.0f).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(job_.parts().in_flight.bytes(), held);
  // The worker comes back on a later stream while the former one has yet to end.
  PushStream later = LaterStreamOf(*member_);
  EXPECT_EQ(*upload_.Take(later, *chunk, {&chunks[0], 1}), std::nullopt);
  EXPECT_EQ(*upload_.Take(member_->stream, *chunk, {&chunks[0], 1}), std::nullopt);
  EXPECT_EQ(job_.parts().in_flight.bytes(), held);
  chunk->header.chunk = 1;
  EXPECT_TRUE(upload_.Take(later, *chunk, {&chunks[0], 1}).ok()) << "goes on with its own beginning";
}

TEST_F(InitialUploadTest, WhatAClosedStreamLeftIsDropped) {
  const std::vector<Bytes> chunks = job_.frames().Initialize(0, 1.0f);
  std::vector<uint8_t> scratch;
  auto chunk = wire::ParseReceived({&chunks[0], 1}, &scratch);
  ASSERT_TRUE(chunk.ok());
  chunk->header.flags &= static_cast<uint16_t>(~wire::kLastChunk);  // more would come
  EXPECT_EQ(*upload_.Take(member_->stream, *chunk, {&chunks[0], 1}), std::nullopt);
  EXPECT_GT(job_.parts().in_flight.bytes(), 0u);
  BucketState& bucket = job_.bucket(0);
  absl::MutexLock lock(&bucket.mu);
  upload_.Abandon(bucket, member_->stream);
  EXPECT_EQ(job_.parts().in_flight.bytes(), 0u);
  EXPECT_TRUE(bucket.upload.chunks.empty());
}

}  // namespace
}  // namespace gradwire
