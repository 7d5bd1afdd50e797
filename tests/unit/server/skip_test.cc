// A job that skips rounds with gradients that are not finite, without a transport: one shard alone, and one whose peer
// the test plays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "tests/lib/recording_sink.h"
#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing_support::JobShardTest;
using testing_support::RecordingSink;
using testing_support::SmallSpec;
using testing_support::TestWorker;

v1::JobSpec SkippingSpec(uint32_t workers = 2) {
  v1::JobSpec spec = SmallSpec("job", workers);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  return spec;
}

class SkipTest : public JobShardTest {
 protected:
  SkipTest() { environment_.clock = &steady_; }
  ~SkipTest() override {
    if (shard_ == nullptr) return;
    shard_->Shut(absl::CancelledError("the test ends"));
    shard_.reset();
  }

  // Two workers that have finished the calibration round.
  void Start(const v1::JobSpec& spec, uint32_t shards) {
    JobShardTest::Start(spec, shards);
    shard_->log().SetSink(std::make_unique<RecordingSink>(&records_));
    a_ = std::make_unique<TestWorker>(Worker("a"));
    b_ = std::make_unique<TestWorker>(Worker("b"));
    for (TestWorker* w : {a_.get(), b_.get()}) ASSERT_TRUE(w->Join().ok());
    a_->InitializeAllRecorded(1.0f);
    for (TestWorker* w : {a_.get(), b_.get()}) PushAll(w, 0, 1.0f);
    for (TestWorker* w : {a_.get(), b_.get()}) w->FollowUpdate(1);
  }
  // The thread that closes rounds comes to it.
  void AwaitVersion(uint64_t version) {
    for (int tries = 0; tries < 10'000 && Status().version() < version; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(Status().version(), version);
  }
  // Round `round` with the finite gradients of both; `flagged`: but for bucket 0 of b.
  void PushRound(uint64_t round, bool flagged) {
    PushAll(a_.get(), round, 2.0f);
    for (uint32_t k = 0; k < b_->frames.buckets(); ++k) {
      const bool flag = flagged && k == 0;
      b_->Push(flag ? b_->frames.Abstain(k, round, /*nonfinite=*/true) : b_->frames.Push(k, round, 4.0f));
    }
  }
  // What shard 1 says of its own part.
  absl::StatusOr<v1::ExchangeReply> Tell(uint64_t round, v1::RoundFate fate) {
    v1::ExchangeRequest request;
    request.set_job(spec_.name());
    request.set_layout_digest(shard_->layout().digest());
    request.set_shard(1);
    request.set_round(round);
    request.mutable_sums()->set_fate(fate);
    return shard_->agreement()->exchange().Take(request);
  }
  void Recover(JobShard& shard) {
    const absl::Status replayed = shard.recovery().Recover(nullptr, [this](const Recovery::RecordVisitor& visit) {
      absl::Status status;
      for (const journal::Record& record : records_) status.Update(visit(record));
      return status;
    });
    ASSERT_EQ(replayed, absl::OkStatus());
  }
  v1::JobStatus Status(bool digest = false) { return shard_->Describe(false, digest); }

  SteadyClock steady_;  // threads close rounds
  std::vector<journal::Record> records_;
  std::unique_ptr<TestWorker> a_, b_;
};

TEST_F(SkipTest, OneWorkersFlagSkipsTheRoundOfAllBuckets) {
  Start(SkippingSpec(), 1);
  const std::string before = Status(true).parameters_sha256();
  PushRound(1, true);
  AwaitVersion(2);
  EXPECT_EQ(Status(true).parameters_sha256(), before);
  EXPECT_EQ(Status().rounds().nonfinite_rounds(), 1u);
  for (const auto& worker : {a_.get(), b_.get()}) {
    for (const Update& update : worker->FollowUpdate(2)) {
      EXPECT_TRUE(update.skipped);
      EXPECT_EQ(update.nonfinite_rounds, 1u);
    }
  }
  PushRound(2, false);
  AwaitVersion(3);
  EXPECT_NE(Status(true).parameters_sha256(), before);
  for (const Update& update : a_->FollowUpdate(3)) {
    EXPECT_FALSE(update.skipped);
    EXPECT_EQ(update.nonfinite_rounds, 1u);
    EXPECT_EQ(update.contributors, 2u) << "nothing of the skipped round is left in it";
    std::vector<float> mean(a_->frames.at(0).elements);
    update.CopyDense(0, mean.size(), mean.data());
    EXPECT_THAT(mean, testing::Each(3.0f));
  }
}

TEST_F(SkipTest, WhoWasAwayIsToldThatItsRoundWasSkipped) {
  Start(SkippingSpec(), 1);
  PushRound(1, true);
  AwaitVersion(2);
  ASSERT_TRUE(shard_->CatchUp(a_->identity, {.round = 1}, 6).ok());
  for (uint64_t round = 2; round < 6; ++round) {
    PushAll(b_.get(), round, 2.0f);
    AwaitVersion(round + 1);
  }
  for (const Update& update : a_->FollowUpdate(2)) EXPECT_TRUE(update.skipped);
  a_->Pull(v1::PULL_UPDATE, 3, /*bucket_end=*/1);  // of a round that was applied
  const auto answers = a_->TakeAnswers();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
}

// Five workers are away, each since another skipped round; four of these are kept.
TEST_F(SkipTest, WhoIsAwayForTooLongIsToldThatItIsNotKnown) {
  constexpr uint64_t kAway = 5;
  JobShardTest::Start(SkippingSpec(kAway + 1));
  shard_->log().SetSink(std::make_unique<RecordingSink>(&records_));
  std::vector<TestWorker> workers;
  for (uint64_t w = 0; w <= kAway; ++w) workers.push_back(Worker(std::string(1, static_cast<char>('a' + w))));
  for (TestWorker& worker : workers) ASSERT_TRUE(worker.Join().ok());
  TestWorker& stays = workers.back();
  workers[0].InitializeAllRecorded(1.0f);
  for (TestWorker& worker : workers) PushAll(&worker, 0, 1.0f);
  uint64_t round = 1;
  for (uint64_t gone = 0; gone < kAway; ++gone, ++round) {
    for (uint64_t w = gone; w < kAway; ++w) PushAll(&workers[w], round, 2.0f);
    for (uint32_t k = 0; k < stays.frames.buckets(); ++k)
      stays.Push(stays.frames.Abstain(k, round, /*nonfinite=*/true));
    AwaitVersion(round + 1);
    ASSERT_TRUE(shard_->CatchUp(workers[gone].identity, {.round = round}, 50).ok());
  }
  for (; round < kAway + 4; ++round) {
    PushAll(&stays, round, 2.0f);
    AwaitVersion(round + 1);
  }
  for (uint64_t w = 0; w < kAway; ++w) {
    workers[w].Pull(v1::PULL_UPDATE, w + 2, /*bucket_end=*/1);
    const auto answers = workers[w].TakeAnswers();
    ASSERT_EQ(answers.size(), 1u);
    const auto expected = w == 0 ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk;
    EXPECT_EQ(answers[0].control.code(), static_cast<int>(expected)) << w;
  }
}

TEST_F(SkipTest, ShardsDecideAlike) {
  const struct {
    bool flagged;
    v1::RoundFate peer;
    bool skipped;
  } cases[] = {{false, v1::FATE_UNSPECIFIED, false},
               {true, v1::FATE_UNSPECIFIED, true},
               {false, v1::FATE_NONFINITE, true},
               {true, v1::FATE_APPLIED, false},
               {false, v1::FATE_SKIPPED, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(testing::Message() << "flagged " << c.flagged << ", the peer says " << c.peer);
    Start(SkippingSpec(), 2);
    const std::string before = Status(true).parameters_sha256();
    PushRound(1, c.flagged);
    EXPECT_EQ(Status().version(), 1u) << "the peer has not told";
    EXPECT_TRUE(Tell(1, c.peer).ok());
    AwaitVersion(2);
    EXPECT_EQ(Status(true).parameters_sha256() == before, c.skipped);
    for (const Update& update : a_->FollowUpdate(2)) EXPECT_EQ(update.skipped, c.skipped);
    // A peer that is started again is told what was agreed on.
    const v1::RoundFate agreed = c.skipped ? v1::FATE_SKIPPED : v1::FATE_APPLIED;
    EXPECT_EQ(Tell(1, v1::FATE_UNSPECIFIED)->sums().fate(), agreed);
    // And so it is by this shard when it is.
    const std::shared_ptr<JobShard> recovered = Make(/*shards=*/2);
    Recover(*recovered);
    const v1::JobStatus again = recovered->Describe(false, true);
    EXPECT_EQ(again.parameters_sha256(), Status(true).parameters_sha256());
    EXPECT_EQ(again.rounds().nonfinite_rounds(), c.skipped ? 1u : 0u);
    shard_->Shut(absl::CancelledError("replaced"));
    shard_ = recovered;
    EXPECT_EQ(Tell(1, v1::FATE_UNSPECIFIED)->sums().fate(), agreed);
    shard_->Shut(absl::CancelledError("the next one"));
    a_.reset();
    b_.reset();
    records_.clear();
  }
}

TEST_F(SkipTest, ARoundThatWasWrittenInPartIsFinishedAsItWasBegun) {
  Start(SkippingSpec(), 2);
  PushRound(1, true);
  EXPECT_TRUE(Tell(1, v1::FATE_UNSPECIFIED).ok());
  AwaitVersion(2);
  // The record of bucket 0 was lost with the server.
  const auto last = std::find_if(records_.rbegin(), records_.rend(), [](const journal::Record& r) {
    return r.type == journal::RecordType::kUpdate && r.round == 1 && r.bucket == 0;
  });
  ASSERT_NE(last, records_.rend());
  records_.erase(std::next(last).base());
  const std::shared_ptr<JobShard> recovered = Make(/*shards=*/2);
  Recover(*recovered);
  shard_->Shut(absl::CancelledError("replaced"));
  shard_ = recovered;
  // Nobody flags it this time.
  for (TestWorker* worker : {a_.get(), b_.get()}) {
    TestWorker again = Worker(worker->identity.worker());
    ASSERT_TRUE(shard_->Resume(again.identity, {.round = 1}).ok());
    again.Attach();
    ASSERT_EQ(again.Push(worker->frames.Push(0, 1, 2.0f)).outcome(), v1::PUSH_INCLUDED);
  }
  EXPECT_TRUE(Tell(1, v1::FATE_UNSPECIFIED).ok());
  AwaitVersion(2);
  EXPECT_EQ(Status().rounds().nonfinite_rounds(), 1u);
}

TEST_F(SkipTest, AFlagThatSaysNothingIsRefused) {
  Start(SmallSpec("job", 2), 1);
  EXPECT_EQ(a_->Push(a_->frames.Abstain(0, 1, /*nonfinite=*/true)).outcome(), v1::PUSH_REFUSED) << "it does not skip";
  Start(SkippingSpec(), 1);
  wire::FrameHeader header;
  header.flags = wire::kNonFinite;  // and does not abstain
  header.shape_digest = a_->frames.at(0).shape_digest;
  header.round = 1;
  header.incarnation = 1;
  EXPECT_EQ(a_->Push(wire::FrameWriter(header).Finish()).outcome(), v1::PUSH_REFUSED);
}

}  // namespace
}  // namespace gradwire
