#include "server/flow/intake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::FlipBit;
using testing_support::LaterStreamOf;
using testing_support::LoggedJob;
using testing_support::SmallSpec;
using testing_support::TestMember;
using testing_support::WithHeader;

constexpr size_t kKindOffset = 5;  // of a chunk's header
constexpr size_t kFlagsOffset = 6;
constexpr size_t kBucketOffset = 8;
constexpr size_t kShardOffset = 12;
constexpr size_t kShapeOffset = 28;
constexpr size_t kIncarnationOffset = 40;

// One bucket, whose frames have several chunks.
v1::JobSpec LargeSpec(v1::RoundMode mode, uint64_t rows = 3072) {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.mutable_tensors(0)->set_shape(0, rows);
  spec.set_bucket_bytes(8 << 20);
  spec.mutable_rounds()->set_mode(mode);
  if (mode == v1::ROUNDS_ASYNC) spec.mutable_rounds()->set_staleness(3);
  return spec;
}

// The intake of a job of two workers. What closes is kept, and makes no version.
class IntakeTest : public testing::Test {
 protected:
  using Ack = std::optional<v1::PushAck>;

  explicit IntakeTest(const v1::JobSpec& spec = LargeSpec(v1::ROUNDS_SYNC))
      : job_(spec), a_(job_.Join("a")), b_(job_.Join("b")) {}
  // The job has parameters, and made version 1 of them: from here on frames carry values.
  void Begin() {
    job_.Initialize(*a_, 1.0f);
    for (TestMember* member : {a_.get(), b_.get()}) {
      if (job_.decided.close.empty()) job_.Merge(*member, 0, 0, 1.0f);
      job_.parts().traffic.Close(member->id);
      job_.parts().traffic.Open(member->id);
    }
    ClosedBucket closed = job_.Closed(0);
    ASSERT_EQ(job_.by_rounds().flow->Finish(&closed), absl::OkStatus());
    ASSERT_TRUE(job_.frames().Follow(0, closed.update.chunks).ok());
    job_.apply.Pass(std::move(closed));
    job_.decided.close.clear();
  }
  std::vector<Bytes> Frame(float value, uint64_t round = 1) { return job_.frames().Push(0, round, value); }
  // What a chunk is answered with; nothing: it is not.
  Ack Take(PushStream& stream, const Bytes& chunk) {
    const absl::StatusOr<Ack> ack = intake_.Take(stream, {&chunk, 1});
    EXPECT_TRUE(ack.ok()) << ack.status();
    return ack.ok() ? *ack : Ack();
  }
  // What the last chunk is answered with; the others are not.
  Ack TakeAll(PushStream& stream, const std::vector<Bytes>& chunks) {
    for (size_t i = 0; i + 1 < chunks.size(); ++i) EXPECT_EQ(Take(stream, chunks[i]), std::nullopt) << i;
    return Take(stream, chunks.back());
  }
  static void ExpectRefused(const Ack& ack, absl::StatusCode code, const std::string& why) {
    ASSERT_TRUE(ack.has_value());
    EXPECT_EQ(ack->outcome(), v1::PUSH_REFUSED);
    EXPECT_EQ(ack->code(), static_cast<int>(code));
    EXPECT_THAT(ack->message(), HasSubstr(why));
  }
  uint64_t Held() { return job_.parts().in_flight.bytes(); }
  size_t Unfinished() {
    absl::MutexLock lock(&job_.bucket(0).mu);
    return job_.bucket(0).open[0].partial.size();
  }
  v1::JobStatus Counted() {
    v1::JobStatus status;
    job_.parts().traffic.Describe(&status);
    return status;
  }
  v1::WorkerStatus CountedOf(const TestMember& member) {
    v1::WorkerStatus status;
    job_.parts().traffic.DescribeWorker(member.id, &status);
    return status;
  }

  LoggedJob job_;
  InitialUpload upload_{&job_.parts(), &job_.log, &job_.desk};
  Intake intake_{&job_.parts(), job_.by_rounds().flow.get(), &upload_};
  const std::unique_ptr<TestMember> a_;
  const std::unique_ptr<TestMember> b_;
};

TEST_F(IntakeTest, AFrameIsHeldUntilItsLastChunkWhichIsAnswered) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f);
  ASSERT_GT(chunks.size(), 2u);
  uint64_t sent = 0;
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    EXPECT_EQ(Take(a_->stream, chunks[i]), std::nullopt);
    sent += chunks[i].size();
    EXPECT_EQ(Held(), sent);
    EXPECT_EQ(CountedOf(*a_).frames(), 0u);
  }
  const Ack ack = Take(a_->stream, chunks.back());
  sent += chunks.back().size();
  ASSERT_TRUE(ack.has_value());
  EXPECT_EQ(ack->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(ack->bucket(), 0u);
  EXPECT_EQ(ack->round(), 1u);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Unfinished(), 0u);
  EXPECT_TRUE(job_.decided.close.empty());
  EXPECT_EQ(TakeAll(b_->stream, Frame(2.0f))->outcome(), v1::PUSH_INCLUDED);
  ASSERT_EQ(job_.decided.close.size(), 1u);
  EXPECT_EQ(job_.decided.close[0].contributors, 2u);

  EXPECT_EQ(CountedOf(*a_).frames(), 1u);
  EXPECT_EQ(CountedOf(*a_).frame_bytes(), sent);
  EXPECT_EQ(Counted().push_bytes(), 2 * sent);
  EXPECT_EQ(Counted().initialize_bytes(), 0u);
  EXPECT_EQ(Counted().refused_frames(), 0u);
}

TEST_F(IntakeTest, AFrameThatBeginsAnewTakesThePlaceOfItsBeginning) {
  Begin();
  const std::vector<Bytes> first = Frame(100.0f), second = Frame(2.0f);
  EXPECT_EQ(Take(a_->stream, first[0]), std::nullopt);
  EXPECT_EQ(Take(a_->stream, first[1]), std::nullopt);
  EXPECT_EQ(Take(a_->stream, second[0]), std::nullopt);
  EXPECT_EQ(Held(), second[0].size());
  EXPECT_EQ(Unfinished(), 1u);
  EXPECT_EQ(TakeAll(a_->stream, {second.begin() + 1, second.end()})->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(TakeAll(b_->stream, Frame(4.0f))->outcome(), v1::PUSH_INCLUDED);
  ClosedBucket closed = job_.Closed(0);
  ASSERT_EQ(job_.by_rounds().flow->Finish(&closed), absl::OkStatus());
  const absl::StatusOr<Update> update = job_.frames().Follow(0, closed.update.chunks);
  ASSERT_TRUE(update.ok()) << update.status();
  for (const Update::DensePart& part : update->dense) {
    std::vector<float> means(part.count);
    std::memcpy(means.data(), part.values.data(), part.count * sizeof(float));
    EXPECT_THAT(means, testing::Each(3.0f)) << "nothing of what was begun";
  }
  EXPECT_FALSE(update->dense.empty());
}

TEST_F(IntakeTest, AllChunksOfAFrameAreOfOneKind) {
  Begin();
  const std::vector<Bytes> gradients = Frame(1.0f);
  const auto replacing = [](const Bytes& chunk) {
    return WithHeader(chunk, kFlagsOffset, static_cast<uint16_t>(wire::kAbstain | wire::kReplace));
  };
  const std::string why = "chunk 1 of a frame whose beginning is not here";
  EXPECT_EQ(Take(a_->stream, replacing(gradients[0])), std::nullopt);
  ExpectRefused(Take(a_->stream, gradients[1]), absl::StatusCode::kInvalidArgument, why);
  EXPECT_EQ(Take(b_->stream, gradients[0]), std::nullopt);
  ExpectRefused(Take(b_->stream, replacing(gradients[1])), absl::StatusCode::kInvalidArgument, why);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Unfinished(), 0u);
}

TEST_F(IntakeTest, ARefusedFrameIsNotWaitedForAndMayComeOnceMore) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  const Ack refused = Take(a_->stream, chunks[2]);
  ExpectRefused(refused, absl::StatusCode::kInvalidArgument, "chunk 2 came where chunk 1 was expected");
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->message(), StartsWith("job 'job' round 1 bucket 0 worker 'a': "));
  for (size_t i = 3; i < chunks.size(); ++i) EXPECT_EQ(Take(a_->stream, chunks[i]), std::nullopt) << "one answer";
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Counted().refused_frames(), 1u);
  EXPECT_EQ(TakeAll(a_->stream, chunks)->outcome(), v1::PUSH_INCLUDED);
  EXPECT_TRUE(job_.decided.close.empty());

  EXPECT_EQ(Take(b_->stream, chunks[0]), std::nullopt);
  ExpectRefused(Take(b_->stream, chunks[2]), absl::StatusCode::kInvalidArgument, "chunk 2 came where");
  ASSERT_EQ(job_.decided.close.size(), 1u) << "over the other one";
  EXPECT_EQ(job_.decided.close[0].contributors, 1u);
}

TEST_F(IntakeTest, ARepeatIsKnownByAllOfItsBytes) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f);
  ASSERT_EQ(TakeAll(a_->stream, chunks)->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(TakeAll(a_->stream, chunks)->outcome(), v1::PUSH_DUPLICATE);
  std::vector<Bytes> other = chunks;
  other.back() = Frame(2.0f).back();
  ExpectRefused(TakeAll(a_->stream, other), absl::StatusCode::kFailedPrecondition, "a repeat must be the same bytes");
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(CountedOf(*a_).frames(), 1u);
  EXPECT_EQ(Counted().refused_frames(), 1u);
}

TEST_F(IntakeTest, WhatCameTooLateIsNotHeldAndSaysWhichRoundIsOpen) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  const auto late = job_.Join("late");  // it is in the next round
  EXPECT_EQ(TakeAll(a_->stream, {chunks.begin() + 1, chunks.end()})->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(TakeAll(b_->stream, chunks)->outcome(), v1::PUSH_INCLUDED);
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    EXPECT_EQ(Take(late->stream, chunks[i]), std::nullopt);
    EXPECT_EQ(Held(), 0u);
  }
  const Ack ack = Take(late->stream, chunks.back());
  ASSERT_TRUE(ack.has_value());
  EXPECT_EQ(ack->outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ(ack->open_round(), 2u);
  EXPECT_EQ(Counted().not_included_frames(), 1u);
  EXPECT_EQ(Counted().refused_frames(), 0u);
}

TEST_F(IntakeTest, AFrameOfARoundThatIsNotOpenLeavesTheOneThatIsUnderWay) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f), next = Frame(1.0f, 2);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  ExpectRefused(Take(a_->stream, next[0]), absl::StatusCode::kFailedPrecondition,
                "a frame of round 2, but round 1 is open");
  EXPECT_EQ(Take(a_->stream, next[1]), std::nullopt) << "of the refused one";
  EXPECT_EQ(Held(), chunks[0].size());
  EXPECT_EQ(TakeAll(a_->stream, {chunks.begin() + 1, chunks.end()})->outcome(), v1::PUSH_INCLUDED);
}

TEST_F(IntakeTest, DamagedBytesEndTheStreamAndTheRoundWaitsForTheFrame) {
  Begin();
  const std::vector<Bytes> chunks = Frame(1.0f);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  const Bytes damaged = FlipBit(chunks[1], 8 * (chunks[1].size() - 1));
  const absl::Status status = intake_.Take(a_->stream, {&damaged, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("job 'job' worker 'a'"), HasSubstr("open a new stream and push again")));
  EXPECT_EQ(Counted().refused_frames(), 1u);
  intake_.AbandonStream(a_->stream);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(TakeAll(b_->stream, chunks)->outcome(), v1::PUSH_INCLUDED);
  EXPECT_TRUE(job_.decided.close.empty());
  PushStream again = a_->stream;
  EXPECT_EQ(TakeAll(again, chunks)->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(job_.decided.close.size(), 1u);
}

TEST_F(IntakeTest, WhatIsOfNoBucketEndsTheStream) {
  Begin();
  const Bytes chunk = WithHeader(Frame(1.0f)[0], kBucketOffset, uint32_t{99});
  const absl::Status status = intake_.Take(a_->stream, {&chunk, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bucket 99 does not exist: this job has 1"));
  EXPECT_EQ(Counted().refused_frames(), 1u);
}

TEST_F(IntakeTest, NothingIsTakenOfAJobThatIsGone) {
  Begin();
  {
    absl::MutexLock lock(&job_.parts().mu);
    job_.parts().shut = absl::AbortedError("deleted");
  }
  const Bytes chunk = Frame(1.0f)[0];
  EXPECT_EQ(intake_.Take(a_->stream, {&chunk, 1}).status(), absl::AbortedError("deleted"));
  EXPECT_EQ(Counted().push_bytes(), 0u);
}

TEST_F(IntakeTest, InitialParametersAreCountedByThemselves) {
  const std::vector<Bytes> chunks = job_.frames().Initialize(0, 1.0f);
  ASSERT_GT(chunks.size(), 1u);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Held(), chunks[0].size());
  intake_.AbandonStream(a_->stream);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(TakeAll(a_->stream, chunks)->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(TakeAll(a_->stream, chunks)->outcome(), v1::PUSH_DUPLICATE);
  ExpectRefused(Take(b_->stream, chunks[0]), absl::StatusCode::kAlreadyExists, "job 'job' round 0 bucket 0");
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Counted().push_bytes(), 0u);
  EXPECT_GT(Counted().initialize_bytes(), 2 * chunks[0].size());
}

// What a header says that no frame of this stream does.
struct Wrong {
  const char* name;
  std::function<Bytes(const Bytes&)> change;
  absl::StatusCode code;
  const char* why;
};

template <typename T>
std::function<Bytes(const Bytes&)> Saying(size_t offset, T value) {
  return [offset, value](const Bytes& chunk) { return WithHeader(chunk, offset, value); };
}

class WrongHeaderTest : public IntakeTest, public testing::WithParamInterface<Wrong> {};

TEST_P(WrongHeaderTest, IsRefusedAndCounted) {
  Begin();
  ExpectRefused(Take(a_->stream, GetParam().change(Frame(1.0f)[0])), GetParam().code, GetParam().why);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Unfinished(), 0u);
  EXPECT_EQ(Counted().refused_frames(), 1u);
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongHeaderTest,
    testing::Values(Wrong{"Kind", Saying(kKindOffset, wire::FrameKind::kUpdate), absl::StatusCode::kInvalidArgument,
                          "a frame of kind 3 cannot be pushed"},
                    Wrong{"Shard", Saying(kShardOffset, uint16_t{7}), absl::StatusCode::kInvalidArgument,
                          "a frame for shard 7 came to shard 0"},
                    Wrong{"Incarnation", Saying(kIncarnationOffset, uint64_t{9}), absl::StatusCode::kInvalidArgument,
                          "a frame of incarnation 0000000000000009 on a stream of incarnation 0000000000000001"},
                    Wrong{"NotFinite", Saying(kFlagsOffset, uint16_t{wire::kNonFinite}),
                          absl::StatusCode::kInvalidArgument, "says that its gradient is not finite"},
                    Wrong{"Replaces", Saying(kFlagsOffset, uint16_t{wire::kReplace}),
                          absl::StatusCode::kInvalidArgument, "says that it replaces parameters"},
                    Wrong{"Shape", Saying(kShapeOffset, uint32_t{1}), absl::StatusCode::kFailedPrecondition,
                          "made for another layout (shape digest 0x00000001"},
                    Wrong{"Last", Saying(kFlagsOffset, uint16_t{wire::kLastChunk}), absl::StatusCode::kInvalidArgument,
                          "covers 65536 of 197632 elements"}),
    [](const auto& info) { return info.param.name; });

// What either kind of rounds promises of frames that are not whole.
class UnfinishedFrameTest : public IntakeTest, public testing::WithParamInterface<v1::RoundMode> {
 protected:
  UnfinishedFrameTest() : IntakeTest(LargeSpec(GetParam())) { Begin(); }
};

INSTANTIATE_TEST_SUITE_P(Modes, UnfinishedFrameTest, testing::Values(v1::ROUNDS_SYNC, v1::ROUNDS_ASYNC),
                         [](const auto& mode) { return mode.param == v1::ROUNDS_ASYNC ? "Async" : "Sync"; });

TEST_P(UnfinishedFrameTest, ChunksComeInOrderFromTheFirst) {
  const std::vector<Bytes> chunks = Frame(1.0f);
  ExpectRefused(Take(a_->stream, chunks[1]), absl::StatusCode::kInvalidArgument,
                "chunk 1 of a frame whose beginning is not here: send the frame from chunk 0");
  EXPECT_EQ(Unfinished(), 0u);
  EXPECT_EQ(Take(b_->stream, chunks[0]), std::nullopt);
  ExpectRefused(Take(b_->stream, chunks[2]), absl::StatusCode::kInvalidArgument,
                "chunk 2 came where chunk 1 was expected");
  EXPECT_EQ(Unfinished(), 0u);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Counted().refused_frames(), 2u);
}

TEST_P(UnfinishedFrameTest, WhatAFormerStreamStillBringsDoesNotSpoilTheFrame) {
  const std::vector<Bytes> chunks = Frame(1.0f);
  PushStream later = LaterStreamOf(*a_);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Take(later, chunks[0]), std::nullopt);
  for (size_t i = 1; i < chunks.size(); ++i) EXPECT_EQ(Take(a_->stream, chunks[i]), std::nullopt) << i;
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(TakeAll(later, {chunks.begin() + 1, chunks.end()})->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(Counted().refused_frames(), 0u);
}

TEST_P(UnfinishedFrameTest, AStreamThatClosesReturnsWhatItLeft) {
  const std::vector<Bytes> chunks = Frame(1.0f);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Take(b_->stream, chunks[0]), std::nullopt);
  const PushStream others = LaterStreamOf(*a_);
  intake_.AbandonStream(others);
  EXPECT_EQ(Held(), 2 * chunks[0].size()) << "another stream of the same member";
  intake_.AbandonStream(a_->stream);
  EXPECT_EQ(Held(), chunks[0].size());
  EXPECT_EQ(Unfinished(), 1u);
  // The old stream is told of as closed when the frame is under way on the next one.
  PushStream next = LaterStreamOf(*b_);
  EXPECT_EQ(Take(next, chunks[0]), std::nullopt);
  intake_.AbandonStream(b_->stream);
  EXPECT_EQ(Held(), chunks[0].size());
  EXPECT_EQ(TakeAll(next, {chunks.begin() + 1, chunks.end()})->outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(Held(), 0u);
}

TEST_P(UnfinishedFrameTest, AMemberThatIsLostReturnsWhatItLeft) {
  const std::vector<Bytes> chunks = Frame(1.0f);
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Take(b_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Take(b_->stream, chunks[1]), std::nullopt);
  const uint64_t held = Held();
  intake_.AbandonMember(b_->id);
  EXPECT_EQ(Held(), held) << "it is a member again, and may have begun this since";
  {
    RoundActions actions;
    absl::MutexLock lock(&job_.parts().mu);
    job_.parts().rounds->Leave(b_->id, job_.clock().Now(), &actions);
  }
  intake_.AbandonMember(b_->id);
  EXPECT_EQ(Held(), chunks[0].size());
  EXPECT_EQ(Unfinished(), 1u);
  EXPECT_EQ(TakeAll(a_->stream, {chunks.begin() + 1, chunks.end()})->outcome(), v1::PUSH_INCLUDED);
}

TEST_P(UnfinishedFrameTest, WhatAllOfThemHoldIsBounded) {
  const std::vector<Bytes> chunks = Frame(1.0f);
  job_.parts().in_flight.SetLimit(2 * chunks[0].size());
  EXPECT_EQ(Take(a_->stream, chunks[0]), std::nullopt);
  EXPECT_EQ(Take(b_->stream, chunks[0]), std::nullopt);
  ExpectRefused(Take(b_->stream, chunks[1]), absl::StatusCode::kResourceExhausted,
                std::to_string(2 * chunks[0].size()) + " bytes of unfinished frames are held for this job");
  EXPECT_EQ(Held(), chunks[0].size());
  EXPECT_EQ(Take(a_->stream, chunks[1]), std::nullopt) << "there is room again";
}

class TooLongFrameTest : public IntakeTest, public testing::WithParamInterface<v1::RoundMode> {
 protected:
  TooLongFrameTest() : IntakeTest(LargeSpec(GetParam(), /*rows=*/8192)) { Begin(); }
};

INSTANTIATE_TEST_SUITE_P(Modes, TooLongFrameTest, testing::Values(v1::ROUNDS_SYNC, v1::ROUNDS_ASYNC),
                         [](const auto& mode) { return mode.param == v1::ROUNDS_ASYNC ? "Async" : "Sync"; });

TEST_P(TooLongFrameTest, IsRefusedWithTheChunkThatIsTooMuch) {
  const uint64_t limit = job_.parts().environment.frame_limit_bytes;
  Ack refused;
  uint64_t sent = 0;
  for (const Bytes& chunk : Frame(1.0f)) {
    sent += chunk.size();
    const Ack ack = Take(a_->stream, chunk);
    EXPECT_EQ(ack.has_value(), sent > limit && !refused.has_value());
    if (ack.has_value()) refused = ack;
    EXPECT_EQ(Held(), sent > limit ? 0 : sent);
  }
  ExpectRefused(refused, absl::StatusCode::kResourceExhausted, "limit is " + std::to_string(limit));
}

}  // namespace
}  // namespace gradwire
