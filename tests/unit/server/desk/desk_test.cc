#include "server/desk/desk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "server/job/memory.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::RecordingStream;
using testing_support::SmallSpec;
using testing_support::TestJob;
using testing_support::TestMember;

// A desk over a job whose versions the test makes by hand.
class DeskTest : public testing::TestWithParam<v1::RoundMode> {
 protected:
  static v1::JobSpec Spec(v1::RoundMode mode) {
    v1::JobSpec spec = SmallSpec("job", 1);
    spec.mutable_rounds()->set_mode(mode);
    if (mode == v1::ROUNDS_ASYNC) spec.mutable_rounds()->set_staleness(3);
    return spec;
  }
  DeskTest() : job_(Spec(GetParam())), desk_(&job_.parts(), job_.by_rounds().answers.get()) {
    member_ = job_.Join("a");
    job_.Initialize(*member_, 1.0f);
  }
  absl::Status Pull(v1::PullKind kind, uint64_t version, const std::shared_ptr<Outbox>& out) {
    v1::PullRequest request;
    request.set_kind(kind);
    request.set_version(version);
    request.set_bucket_end(1);
    return desk_.Pull(member_->id, request, out);
  }
  // The next version of bucket 0, of which what comes up to `durable` may be seen.
  void MakeVersion(uint64_t durable) {
    BucketState& bucket = job_.bucket(0);
    std::vector<Delivery> ready;
    {
      absl::MutexLock lock(&bucket.mu);
      ++bucket.version;
      bucket.durable = durable;
      bucket.serialized = nullptr;
      ready = desk_.TakeReady(bucket);
    }
    desk_.Deliver(std::move(ready));
  }
  std::vector<v1::PullMessage> Take() {
    std::vector<v1::PullMessage> answers;
    for (const transport::Message& message : member_->received->sent) {
      EXPECT_TRUE(answers.emplace_back().ParseFromString(message.control));
    }
    member_->received->sent.clear();
    return answers;
  }

  TestJob job_;
  Desk desk_;
  std::unique_ptr<TestMember> member_;
};

INSTANTIATE_TEST_SUITE_P(Modes, DeskTest, testing::Values(v1::ROUNDS_SYNC, v1::ROUNDS_ASYNC),
                         [](const auto& mode) { return mode.param == v1::ROUNDS_ASYNC ? "Async" : "Sync"; });

TEST_P(DeskTest, AnswersAtOnceWhatIsThere) {
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 0, member_->out).ok());
  const auto answers = Take();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].code(), 0) << answers[0].message();
  EXPECT_TRUE(answers[0].last());
}

TEST_P(DeskTest, WhoWaitsIsAnsweredWhenTheVersionMayBeSeen) {
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  EXPECT_TRUE(Take().empty());
  MakeVersion(/*durable=*/0);
  EXPECT_TRUE(Take().empty()) << "its record may still be lost";
  MakeVersion(/*durable=*/1);
  const auto answers = Take();
  // The copy that was made of version 1, though the bucket is at version 2.
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].code(), 0) << answers[0].message();
}

TEST_P(DeskTest, AStreamThatHasClosedIsForgotten) {
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  desk_.Forget(member_->out);
  MakeVersion(1);
  EXPECT_TRUE(Take().empty());
}

TEST_P(DeskTest, AWaiterTooManyTakesThePlaceOfOneOfAnotherStream) {
  const auto old_stream = std::make_shared<RecordingStream>();
  const auto old = std::make_shared<Outbox>(old_stream);
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, old).ok());
  for (size_t i = 1; i < MaxWaitersPerMember(job_.parts().job); ++i) {
    ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  }
  EXPECT_TRUE(old_stream->sent.empty());
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  ASSERT_EQ(old_stream->sent.size(), 1u) << "it gave way";
  EXPECT_TRUE(Take().empty());
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  const auto refused = Take();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
}

TEST_P(DeskTest, ABucketThatStoppedTellsWhy) {
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 1, member_->out).ok());
  {
    absl::MutexLock lock(&job_.bucket(0).mu);
    job_.bucket(0).failure = absl::InternalError("it broke");
  }
  MakeVersion(0);
  const auto answers = Take();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_THAT(answers[0].message(), HasSubstr("it broke"));
}

TEST_P(DeskTest, RefusesWhoIsNoMemberAndKindsThatAreNotPulled) {
  v1::PullRequest request;
  request.set_kind(v1::PULL_PARAMS_F32);
  request.set_bucket_end(1);
  EXPECT_EQ(desk_.Pull(member_->id + 1, request, member_->out).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Pull(static_cast<v1::PullKind>(77), 1, member_->out).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Pull(v1::PULL_UPDATE, 1, member_->out).ok(), GetParam() == v1::ROUNDS_SYNC);
}

TEST_P(DeskTest, AnEarlierVersionIsThereOnlyWhereAnyLaterOneWillDo) {
  MakeVersion(1);
  ASSERT_TRUE(Pull(v1::PULL_PARAMS_F32, 0, member_->out).ok());
  const auto answers = Take();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].code() == 0, GetParam() == v1::ROUNDS_ASYNC) << answers[0].message();
}

// When the first message is sent, another thread begins to deliver.
class CrossedStream final : public transport::Stream {
 public:
  absl::Status Send(transport::Message message) override {
    bool first = false;
    {
      absl::MutexLock lock(&mu_);
      v1::PullMessage pull;
      EXPECT_TRUE(pull.ParseFromString(message.control));
      versions_.push_back(pull.version());
      first = versions_.size() == 1;
    }
    if (!first) return absl::OkStatus();
    other_ = std::thread(meanwhile);
    absl::MutexLock lock(&mu_);
    const auto came = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return versions_.size() > 1; };
    mu_.AwaitWithTimeout(absl::Condition(&came), absl::Milliseconds(100));
    return absl::OkStatus();
  }
  void Finish(absl::Status) override {}
  void Cancel() override {}
  std::vector<uint64_t> Versions() {
    other_.join();
    absl::MutexLock lock(&mu_);
    return versions_;
  }
  std::function<void()> meanwhile;

 private:
  absl::Mutex mu_;
  std::vector<uint64_t> versions_ ABSL_GUARDED_BY(mu_);
  std::thread other_;
};

// Two rounds of one bucket may be delivered at once, and whoever receives them tells chunks by bucket and kind alone.
TEST_P(DeskTest, ChunksOfTwoAnswersDoNotMix) {
  wire::FrameWriter writer({.kind = wire::FrameKind::kUpdate}, 1024);
  const std::vector<uint8_t> payload(800);
  for (int i = 0; i < 3; ++i) writer.Add({wire::SegmentType::kValues, 8, 0, 800, 800}, payload.data());
  const auto frame = std::make_shared<const wire::FrameToSend>(writer.Finish());
  const auto stream = std::make_shared<CrossedStream>();
  const auto out = std::make_shared<Outbox>(stream);
  const auto deliver = [&](uint64_t version) {
    Delivery delivery;
    delivery.to = {member_->id, out, v1::PULL_UPDATE, version};
    delivery.frame = frame;
    std::vector<Delivery> deliveries;
    deliveries.push_back(std::move(delivery));
    desk_.Deliver(std::move(deliveries));
  };
  stream->meanwhile = [&] { deliver(2); };
  deliver(1);
  EXPECT_THAT(stream->Versions(), testing::ElementsAre(1, 1, 1, 2, 2, 2));
}

}  // namespace
}  // namespace gradwire
