// The rounds of one worker against shards that answer when the test says so: what waits, what is sent again, what an
// error ends and what it does not.
#include "client/cpp/internal/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/client/one_worker.h"

namespace gradwire::client {
namespace {

using testing::HasSubstr;

// A shard that keeps what it is sent.
class HeldLink final : public FrameLink {
 public:
  struct Sent {
    std::vector<Bytes> chunks;
    std::vector<v1::PullKind> pull;
    wire::FrameHeader header() const { return wire::ParseHeader(chunks[0].span()).value(); }
    bool abstains() const { return (header().flags & wire::kAbstain) != 0; }
  };
  explicit HeldLink(uint32_t shard) : shard_(shard) {}
  absl::Status SendFrame(OutgoingFrame frame) override {
    sent.push_back({std::move(frame.chunks), std::move(frame.pull)});
    return broken ? absl::UnavailableError("the stream broke") : absl::OkStatus();
  }
  absl::Status RequestPull(v1::PullKind, uint64_t, uint32_t, uint32_t) override { return absl::OkStatus(); }
  absl::StatusOr<uint64_t> CatchUp(uint64_t) override { return goes_on; }
  absl::Status Annotate(const absl::Status& status) const override {
    return absl::Status(status.code(), absl::StrCat("shard ", shard_, ": ", std::string(status.message())));
  }
  std::deque<Sent> sent;
  bool broken = false;
  absl::StatusOr<uint64_t> goes_on = absl::UnimplementedError("nobody is behind");  // with this version

 private:
  const uint32_t shard_;
};

class ExchangeTest : public testing::Test {
 protected:
  ExchangeTest() : worker_(SmallSpec("dense:fp32")), links_{HeldLink(0), HeldLink(1)} {
    exchange_.emplace(ExchangeContext{worker_.context, {&links_[0], &links_[1]}}, 0, worker_.plans);
  }

  void Begin(Tensors gradient) {
    gradient_ = std::move(gradient);  // borrowed until the round ends
    ASSERT_EQ(exchange_->Begin(OneWorker::kRates), absl::OkStatus());
    for (uint32_t t = 0; t < gradient_.size(); ++t)
      ASSERT_EQ(exchange_->Ready(t, gradient_[t].data()), absl::OkStatus());
  }

  // Takes the oldest frame of a shard, and answers it with the update of this worker alone; of nobody where it
  // abstains.
  void Answer(uint32_t shard, v1::PushOutcome outcome = v1::PUSH_INCLUDED) {
    ASSERT_FALSE(links_[shard].sent.empty());
    const HeldLink::Sent sent = links_[shard].sent.front();
    links_[shard].sent.pop_front();
    const wire::FrameHeader header = sent.header();
    const uint32_t slice = header.bucket * kShardCount + shard;
    v1::PushAck ack;
    ack.set_bucket(header.bucket);
    ack.set_round(header.round);
    ack.set_outcome(outcome);
    if (outcome == v1::PUSH_REFUSED) {
      ack.set_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
      ack.set_message("too large");
    }
    exchange_->OnAck(shard, ack);
    if (outcome == v1::PUSH_REFUSED) return;
    PullAnswer answer;
    answer.kind = v1::PULL_UPDATE;
    answer.bucket = header.bucket;
    answer.version = header.round + 1;
    const bool merged = outcome == v1::PUSH_INCLUDED && !sent.abstains();
    answer.chunks = worker_.Merge(slice, header.round, worker_.codecs[slice]->InitialPlan(),
                                  merged ? sent.chunks : std::vector<Bytes>());
    exchange_->OnAnswer(shard, std::move(answer));
  }
  void AnswerAll(v1::PushOutcome outcome = v1::PUSH_INCLUDED) {
    for (uint32_t shard = 0; shard < kShardCount; ++shard)
      while (!links_[shard].sent.empty()) Answer(shard, outcome);
  }

  // Round 0 calibrates; End then sends the same gradients again.
  void Calibrate() {
    AnswerAll();
    EXPECT_TRUE(absl::IsDeadlineExceeded(exchange_->End(0)));
  }

  SessionStats Stats() const {
    SessionStats stats;
    exchange_->AddStats(&stats);
    return stats;
  }

  static Tensors Negative(Tensors values) {
    for (std::vector<float>& tensor : values)
      for (float& x : tensor) x = -x;
    return values;
  }

  OneWorker worker_;
  Tensors gradient_;
  HeldLink links_[kShardCount];
  std::optional<Exchange> exchange_;
};

TEST_F(ExchangeTest, AStepIsThereOnceEveryShardHasAnswered) {
  const Tensors gradient = worker_.NextGradient();
  const Tensors zeros = worker_.parameters;
  Begin(gradient);
  Calibrate();
  EXPECT_EQ(worker_.parameters, zeros);
  const size_t frames = links_[1].sent.size();
  EXPECT_EQ(frames, worker_.layout.bucket_count());
  while (links_[0].sent.size() > 0) Answer(0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(exchange_->End(0))) << "the other shard owes its part";
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
  EXPECT_EQ(worker_.parameters, Negative(gradient));
  EXPECT_EQ(exchange_->version(), 2u);
  EXPECT_EQ(Stats().steps, 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(exchange_->End(0))) << "no round is open";
}

TEST_F(ExchangeTest, ARoundIsOpenUntilItEnds) {
  const Tensors gradient = worker_.NextGradient();
  EXPECT_TRUE(absl::IsFailedPrecondition(exchange_->Ready(0, gradient[0].data())));
  Begin(gradient);
  EXPECT_TRUE(absl::IsFailedPrecondition(exchange_->Begin(OneWorker::kRates)));
  EXPECT_TRUE(absl::IsFailedPrecondition(exchange_->Drain(0)));
  EXPECT_TRUE(absl::IsFailedPrecondition(exchange_->Plans().status()));
  Calibrate();
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
  EXPECT_EQ(exchange_->Drain(0), absl::OkStatus());
  EXPECT_TRUE(exchange_->Plans().ok());
}

TEST_F(ExchangeTest, WhatCameTooLateIsInTheNextStep) {
  const Tensors first = worker_.NextGradient(), second = worker_.NextGradient();
  Begin(first);
  Calibrate();
  AnswerAll(v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
  EXPECT_EQ(Stats().not_included_frames, worker_.slices());
  Begin(second);
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
  Tensors both = first;
  AddTo(&both, second);
  EXPECT_EQ(worker_.parameters, Negative(both));
}

TEST_F(ExchangeTest, ARefusedFrameIsAnErrorOfItsStepAlone) {
  Begin(worker_.NextGradient());
  Calibrate();
  Answer(1, v1::PUSH_REFUSED);
  ASSERT_FALSE(links_[1].sent.empty());
  EXPECT_TRUE(links_[1].sent.back().abstains()) << "so that nobody waits for it";
  AnswerAll();
  const absl::Status refused = exchange_->End(0);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("shard 1: too large"));
  Begin(worker_.NextGradient());
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
}

TEST_F(ExchangeTest, SendsTheSameBytesAgainOnANewConnection) {
  Begin(worker_.NextGradient());
  Calibrate();
  Answer(0);
  const std::deque<HeldLink::Sent> before = links_[0].sent;
  links_[0].sent.clear();  // lost on their way
  ASSERT_TRUE(exchange_->ResumeAt(0).has_value());
  EXPECT_EQ(exchange_->ResumeAt(0)->round, 1u);
  exchange_->OnResumed(0, /*behind=*/false);
  ASSERT_EQ(links_[0].sent.size(), before.size()) << "what was answered is not sent again";
  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_EQ(links_[0].sent[i].chunks.size(), before[i].chunks.size());
    for (size_t c = 0; c < before[i].chunks.size(); ++c)
      EXPECT_TRUE(std::ranges::equal(links_[0].sent[i].chunks[c].span(), before[i].chunks[c].span()));
    EXPECT_EQ(links_[0].sent[i].pull, before[i].pull);
  }
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
}

TEST_F(ExchangeTest, AConnectionThatBreaksWhileItSendsIsNoError) {
  links_[0].broken = true;
  Begin(worker_.NextGradient());
  links_[0].broken = false;
  links_[0].sent.clear();
  exchange_->OnResumed(0, false);
  Calibrate();
  AnswerAll();
  EXPECT_EQ(exchange_->End(0), absl::OkStatus());
}

TEST_F(ExchangeTest, WhoCannotCatchUpInTimeMayTryAgain) {
  Begin(worker_.NextGradient());
  Calibrate();
  AnswerAll();
  exchange_->OnResumed(0, /*behind=*/true);
  for (const absl::Status& away : {absl::UnavailableError("shard 0 is away"), absl::AbortedError("could not agree")}) {
    links_[0].goes_on = away;
    const absl::Status late = exchange_->End(0);
    EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
    EXPECT_THAT(std::string(late.message()), HasSubstr(std::string(away.message())));
  }
  for (HeldLink& link : links_) link.goes_on = 2;
  EXPECT_EQ(exchange_->End(0), absl::OkStatus()) << "they go on with the version that this worker has";
}

TEST_F(ExchangeTest, NoRoundBeginsBeforeItHasCaughtUp) {
  Begin(worker_.NextGradient());
  Calibrate();
  AnswerAll();
  ASSERT_EQ(exchange_->End(0), absl::OkStatus());
  exchange_->OnResumed(0, /*behind=*/true);
  for (HeldLink& link : links_) link.goes_on = 4;
  EXPECT_TRUE(absl::IsDeadlineExceeded(exchange_->Drain(0)));
  const absl::Status early = exchange_->Begin(OneWorker::kRates);
  EXPECT_TRUE(absl::IsFailedPrecondition(early));
  EXPECT_THAT(std::string(early.message()), HasSubstr("call Drain again"));
}

TEST_F(ExchangeTest, ALostShardEndsEverything) {
  const Tensors gradient = worker_.NextGradient();
  Begin(gradient);
  const absl::Status lost = absl::UnavailableError("shard 1 is lost");
  exchange_->OnLost(1, lost);
  EXPECT_EQ(exchange_->End(1000), lost);
  EXPECT_EQ(exchange_->Begin(OneWorker::kRates), lost);
  EXPECT_EQ(exchange_->Drain(1000), lost);
  EXPECT_FALSE(exchange_->ResumeAt(0).has_value());
}

TEST_F(ExchangeTest, AnAnswerThatNobodyAskedForEndsIt) {
  Begin(worker_.NextGradient());
  PullAnswer answer;
  answer.kind = v1::PULL_UPDATE;
  answer.bucket = 0;
  answer.version = 9;
  exchange_->OnAnswer(0, answer);
  const absl::Status ended = exchange_->End(0);
  EXPECT_TRUE(absl::IsInternal(ended));
  EXPECT_THAT(std::string(ended.message()), HasSubstr("shard 0: it answered with bucket 0 version 9"));
}

}  // namespace
}  // namespace gradwire::client
