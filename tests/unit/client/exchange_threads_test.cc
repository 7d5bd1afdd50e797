// Exchanges with threads against shards that take no more, or answer early: what the others get, what is encoded, and
// when updates are applied.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/async_exchange.h"
#include "client/cpp/internal/exchange.h"
#include "tests/unit/client/coalesced.h"
#include "tests/unit/client/one_worker.h"

namespace gradwire::client {
namespace {

constexpr absl::Duration kHangs = absl::Seconds(120);  // what takes that long never comes

// Several buckets of several tensors; large enough for threads.
v1::JobSpec LargeSpec() {
  v1::JobSpec spec = SmallSpec("dense:fp32");
  for (uint64_t size : {9000, 70, 12000, 4096, 3}) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", spec.tensors_size()));
    tensor->add_shape(size);
  }
  return spec;
}

// A shard that is sent frames until it is full. Thread-safe.
class FillingLink final : public FrameLink {
 public:
  bool HasRoom() const override { return frames_ < capacity; }
  absl::Status SendFrame(OutgoingFrame frame) override {
    absl::MutexLock lock(&mu_);
    const wire::FrameHeader header = wire::ParseHeader(frame.chunks[0].span()).value();
    EXPECT_TRUE(sent_.insert(header.bucket).second || again_) << "bucket " << header.bucket << " was sent twice";
    chunks_[header.bucket] = std::move(frame.chunks);
    ++frames_;
    return absl::OkStatus();
  }
  absl::Status RequestPull(v1::PullKind, uint64_t, uint32_t, uint32_t) override { return absl::OkStatus(); }
  absl::StatusOr<uint64_t> CatchUp(uint64_t) override { return absl::UnimplementedError("nobody is behind"); }
  absl::Status Annotate(const absl::Status& status) const override { return status; }

  bool AwaitFrames(size_t frames) {
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return sent_.size() >= frames; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&there), kHangs);
  }
  std::vector<Bytes> AwaitBucket(uint32_t bucket) {
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return chunks_.contains(bucket); };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), kHangs));
    return chunks_[bucket];
  }
  std::set<uint32_t> sent() const {  // buckets
    absl::MutexLock lock(&mu_);
    return sent_;
  }

  void Forget() {
    absl::MutexLock lock(&mu_);
    sent_.clear();
    chunks_.clear();
  }
  void AllowAgain() {
    absl::MutexLock lock(&mu_);
    again_ = true;
  }

  std::atomic<size_t> capacity = SIZE_MAX;

 private:
  mutable absl::Mutex mu_;
  std::set<uint32_t> sent_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, std::vector<Bytes>> chunks_ ABSL_GUARDED_BY(mu_);
  bool again_ ABSL_GUARDED_BY(mu_) = false;  // frames may come twice
  std::atomic<size_t> frames_ = 0;
};

// Round 0 of one worker, whose frames nobody answers.
struct Sender {
  explicit Sender(uint32_t threads)
      : worker(LargeSpec()),
        exchange(ExchangeContext{worker.context, {&links[0], &links[1]}, 0, threads}, 0, worker.plans) {}
  void Begin() {
    ASSERT_EQ(exchange.Begin(OneWorker::kRates), absl::OkStatus());
    gradient = worker.NextGradient();
    for (uint32_t t = 0; t < gradient.size(); ++t) ASSERT_EQ(exchange.Ready(t, gradient[t].data()), absl::OkStatus());
  }
  size_t buckets() const { return worker.layout.bucket_count(); }

  OneWorker worker;
  Tensors gradient;
  FillingLink links[kShardCount];
  Exchange exchange;
};

class ExchangeThreadsTest : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Threads, ExchangeThreadsTest, testing::Values(1, 2, 5),
                         [](const auto& info) { return absl::StrCat(info.param); });

TEST_P(ExchangeThreadsTest, AShardThatTakesNothingHoldsNoOther) {
  Sender sender(GetParam());
  ASSERT_GE(sender.buckets(), 8u);
  sender.links[0].capacity = 2;
  ASSERT_NO_FATAL_FAILURE(sender.Begin());
  ASSERT_TRUE(sender.links[1].AwaitFrames(sender.buckets()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(sender.exchange.End(0)));
  const size_t held = sender.links[0].sent().size();
  EXPECT_LE(held, 2 + GetParam() - 1) << "what is encoded for it is bounded";
  sender.exchange.Stop(absl::CancelledError("it was left"));
  EXPECT_LT(sender.links[0].sent().size(), sender.buckets());
  EXPECT_TRUE(absl::IsCancelled(sender.exchange.End(1000)));
}

TEST_P(ExchangeThreadsTest, WhatAShardHadNoRoomForFollows) {
  Sender sender(GetParam());
  sender.links[0].capacity = 1;
  ASSERT_NO_FATAL_FAILURE(sender.Begin());
  ASSERT_TRUE(sender.links[1].AwaitFrames(sender.buckets()));
  sender.links[0].capacity = SIZE_MAX;
  sender.exchange.OnRoom(0);
  EXPECT_TRUE(sender.links[0].AwaitFrames(sender.buckets()));
}

TEST_P(ExchangeThreadsTest, ABreakWhileItEncodesLosesNoFrame) {
  Sender sender(GetParam());
  sender.links[0].capacity = 1;
  sender.links[0].AllowAgain();
  ASSERT_NO_FATAL_FAILURE(sender.Begin());
  sender.exchange.OnResumed(0, /*behind=*/false);
  sender.links[0].capacity = SIZE_MAX;
  sender.exchange.OnRoom(0);
  EXPECT_TRUE(sender.links[0].AwaitFrames(sender.buckets()));
  EXPECT_TRUE(sender.links[1].AwaitFrames(sender.buckets()));
}

// The update of one slice comes while other tensors are not ready yet.
class EarlyUpdates : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Early, EarlyUpdates, testing::Bool(),
                         [](const auto& info) { return info.param ? "asked_for" : "by_default_not"; });

TEST_P(EarlyUpdates, AreAppliedBeforeTheRoundEndsWhereAskedFor) {
  constexpr uint32_t kBucket = 0, kShard = 1, kSlice = kBucket * kShardCount + kShard;
  OneWorker worker(LargeSpec());
  for (uint32_t s = 0; s < worker.slices(); ++s) worker.plans[s].Push(worker.codecs[s]->InitialPlan(), false);
  FillingLink links[kShardCount];
  Exchange exchange({worker.context, {&links[0], &links[1]}, 0, 1, GetParam()}, 1, worker.plans);
  const Tensors zeros = worker.parameters;
  const Tensors gradient = worker.NextGradient();
  ASSERT_EQ(exchange.Begin(OneWorker::kRates), absl::OkStatus());
  for (const BucketPart& part : worker.layout.parts(kBucket))
    ASSERT_EQ(exchange.Ready(part.tensor, gradient[part.tensor].data()), absl::OkStatus());

  PullAnswer answer;
  answer.kind = v1::PULL_UPDATE;
  answer.bucket = kBucket;
  answer.version = 2;
  answer.chunks = worker.Merge(kSlice, 1, worker.codecs[kSlice]->InitialPlan(), links[kShard].AwaitBucket(kBucket));
  v1::PushAck ack;
  ack.set_bucket(kBucket);
  ack.set_round(1);
  ack.set_outcome(v1::PUSH_INCLUDED);
  exchange.OnAck(kShard, ack);
  exchange.OnAnswer(kShard, std::move(answer));
  SessionStats stats;
  for (const absl::Time hangs = absl::Now() + kHangs; stats.apply_seconds == 0 && absl::Now() < hangs;)
    exchange.AddStats(&stats);
  EXPECT_GT(stats.apply_seconds, 0) << "it was never decoded";
  EXPECT_FALSE(exchange.End(0).ok()) << "most tensors are not ready";
  exchange.Stop(absl::CancelledError("it was left"));

  Tensors expected = zeros;
  if (GetParam())
    for (const auto& run : worker.LayoutOf(kSlice).runs)
      for (uint64_t i = run.offset; i < run.offset + run.length; ++i)
        expected[run.tensor][i] = -gradient[run.tensor][i];
  EXPECT_EQ(worker.parameters, expected);
}

// A worker whose shards answer.
struct Answered {
  explicit Answered(const Coalescing& coalescing) : worker(LargeSpec()) {
    for (uint32_t s = 0; s < worker.slices(); ++s) worker.plans[s].Push(worker.codecs[s]->InitialPlan(), false);
    gradient = worker.NextGradient();
    exchange.emplace(
        ExchangeContext{.slices = worker.context, .links = {&links[0], &links[1]}, .coalescing = coalescing}, 1,
        worker.plans);
  }
  // The next round, in which all gradients but one get ready. Whether some of them were sent before that one is.
  bool BeginsEarly() {
    for (FillingLink& link : links) link.Forget();
    EXPECT_EQ(exchange->Begin(OneWorker::kRates), absl::OkStatus());
    for (uint32_t t = 1; t < gradient.size(); ++t) EXPECT_EQ(exchange->Ready(t, gradient[t].data()), absl::OkStatus());
    absl::SleepFor(absl::Milliseconds(50));
    return !links[0].sent().empty();
  }
  void End(absl::Duration late) {
    EXPECT_EQ(exchange->Ready(0, gradient[0].data()), absl::OkStatus());
    const uint64_t round = exchange->version();
    for (FillingLink& link : links) EXPECT_TRUE(link.AwaitFrames(worker.layout.bucket_count()));
    absl::SleepFor(late);
    for (uint32_t slice = 0; slice < worker.slices(); ++slice) {
      v1::PushAck ack;
      ack.set_bucket(slice / kShardCount);
      ack.set_round(round);
      ack.set_outcome(v1::PUSH_INCLUDED);
      exchange->OnAck(slice % kShardCount, ack);
    }
    for (uint32_t slice = 0; slice < worker.slices(); ++slice) {
      const uint32_t bucket = slice / kShardCount, shard = slice % kShardCount;
      PullAnswer answer;
      answer.kind = v1::PULL_UPDATE;
      answer.bucket = bucket;
      answer.version = round + 1;
      answer.chunks = worker.Merge(slice, round, worker.codecs[slice]->InitialPlan(), links[shard].AwaitBucket(bucket));
      exchange->OnAnswer(shard, std::move(answer));
    }
    ASSERT_EQ(exchange->End(120'000), absl::OkStatus());
  }

  OneWorker worker;
  Tensors gradient;
  FillingLink links[kShardCount];
  std::optional<Exchange> exchange;
};

TEST(ExchangeThreads, GradientsWaitOnceAcknowledgementsCameSoon) {
  ScriptedTimes::says = true;
  ScriptedTimes::ran = 0;
  ScriptedTimes::step = TimeNs{3600} * 1'000'000'000;
  Answered worker{Coalescing(&ScriptedTimes::Read)};
  bool early = worker.BeginsEarly();
  EXPECT_TRUE(early);
  for (int i = 0; early && i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(worker.End(absl::ZeroDuration()));
    absl::SleepFor(absl::Milliseconds(500));
    early = worker.BeginsEarly();
  }
  EXPECT_FALSE(early);
  ASSERT_NO_FATAL_FAILURE(worker.End(absl::ZeroDuration()));
}

TEST(ExchangeThreads, GradientsDoNotWaitWhileAcknowledgementsAreLate) {
  ScriptedTimes::says = true;
  ScriptedTimes::ran = 0;
  ScriptedTimes::step = TimeNs{3600} * 1'000'000'000;
  Answered worker{Coalescing(&ScriptedTimes::Read)};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(worker.BeginsEarly());
    ASSERT_NO_FATAL_FAILURE(worker.End(absl::Milliseconds(100)));
  }
}

// Who waits for a bucket in the middle of a round gets it, though others of its gradients would wait.
class AwaitedBucket : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Until, AwaitedBucket, testing::Bool(),
                         [](const auto& info) { return info.param ? "applied" : "pushed"; });

TEST_P(AwaitedBucket, IsSentAtOnce) {
  constexpr uint32_t kBucket = 0;
  OneWorker worker(LargeSpec());
  const Tensors gradient = worker.NextGradient();
  FillingLink links[kShardCount];
  Exchange exchange({.slices = worker.context, .links = {&links[0], &links[1]}, .coalescing = Coalesced()}, 0,
                    worker.plans);
  ASSERT_EQ(exchange.Begin(OneWorker::kRates), absl::OkStatus());
  for (const BucketPart& part : worker.layout.parts(kBucket))
    ASSERT_EQ(exchange.Ready(part.tensor, gradient[part.tensor].data()), absl::OkStatus());
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_TRUE(links[0].sent().empty());
  const auto wait = GetParam() ? &Exchange::WaitApplied : &Exchange::WaitPushed;
  EXPECT_TRUE(absl::IsDeadlineExceeded((exchange.*wait)(kBucket, 0)));
  EXPECT_TRUE(links[0].AwaitFrames(1));
  EXPECT_TRUE(links[1].AwaitFrames(1));
}

TEST(AsyncExchangeThreads, AnAwaitedBucketIsSentAtOnce) {
  for (const auto wait : {&AsyncExchange::WaitApplied, &AsyncExchange::WaitPushed}) {
    v1::JobSpec spec = LargeSpec();
    spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
    OneWorker worker(spec, PullMode::kParams);
    const Tensors gradient = worker.NextGradient();
    FillingLink links[kShardCount];
    AsyncExchange exchange(worker.context, {&links[0], &links[1]}, std::vector<uint64_t>(worker.slices(), 1),
                           worker.plans, 1, Coalesced());
    ASSERT_EQ(exchange.Begin(OneWorker::kRates), absl::OkStatus());
    for (const BucketPart& part : worker.layout.parts(0))
      ASSERT_EQ(exchange.Ready(part.tensor, gradient[part.tensor].data()), absl::OkStatus());
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_TRUE(links[0].sent().empty());
    EXPECT_TRUE(absl::IsDeadlineExceeded((exchange.*wait)(0, 0)));
    EXPECT_TRUE(links[0].AwaitFrames(1));
    EXPECT_TRUE(links[1].AwaitFrames(1));
  }
}

}  // namespace
}  // namespace gradwire::client
