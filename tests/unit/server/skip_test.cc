// A job that skips rounds with gradients that are not finite, without a transport: one shard alone, and one whose peer
// the test plays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "server/job/job_shard.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/subject.h"

namespace gradwire {
namespace {

using testing_support::FrameMaker;
using testing_support::RecordingStream;
using testing_support::SmallSpec;

v1::JobSpec SkippingSpec() {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  return spec;
}

// Keeps what it is given; all of it may be seen at once.
class SeenAtOnceSink final : public UpdateSink {
 public:
  explicit SeenAtOnceSink(std::vector<journal::Record>* records) : records_(records) {}
  void Append(journal::Record record, std::function<void()> visible) override {
    {
      absl::MutexLock lock(&mu_);
      records_->push_back(std::move(record));
    }
    visible();
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}

 private:
  absl::Mutex mu_;
  std::vector<journal::Record>* const records_;
};

class SkipTest : public testing::Test {
 protected:
  struct Pusher {
    // `round`: goes on with that one.
    Pusher(JobShard* shard, const v1::JobSpec& spec, const std::string& name, std::optional<uint64_t> round = {})
        : shard(shard), frames(spec, shard->shard_index(), shard->layout().shard_count(), 1) {
      v1::WorkerIdentity identity;
      identity.set_job(spec.name());
      identity.set_worker(name);
      identity.set_incarnation(1);
      EXPECT_TRUE((round ? shard->Resume(identity, {.round = *round}) : shard->Join(identity, 0, true)).ok());
      out = std::make_shared<Outbox>(answers);
      stream.member = *shard->Attach(identity, out);
      stream.incarnation = 1;
      stream.worker = name;
      stream.out = out;
    }
    v1::PushAck Push(const std::vector<Bytes>& chunks) {
      v1::PushAck last;
      for (const Bytes& chunk : chunks) {
        const auto ack = shard->intake().Take(stream, {&chunk, 1});
        EXPECT_TRUE(ack.ok()) << ack.status();
        if (ack.ok() && *ack) last = **ack;
      }
      return last;
    }
    void PushAll(uint64_t round, float value) {
      for (uint32_t b = 0; b < frames.buckets(); ++b) {
        EXPECT_NE(Push(frames.Push(b, round, value)).outcome(), v1::PUSH_REFUSED);
      }
    }
    // The update that makes `version` of every bucket, which is there.
    std::vector<Update> Follow(uint64_t version) {
      v1::PullRequest request;
      request.set_kind(v1::PULL_UPDATE);
      request.set_version(version);
      request.set_bucket_end(frames.buckets());
      answers->sent.clear();  // acknowledgements
      EXPECT_TRUE(shard->desk().Pull(stream.member, request, out).ok());
      std::vector<Update> updates;
      for (const transport::Message& message : std::exchange(answers->sent, {})) {
        v1::PullMessage control;
        EXPECT_TRUE(control.ParseFromString(message.control));
        const auto update = frames.Follow(control.bucket(), message.frame);
        EXPECT_TRUE(update.ok()) << update.status();
        if (update.ok()) updates.push_back(*update);
      }
      EXPECT_EQ(updates.size(), frames.buckets());
      return updates;
    }

    JobShard* const shard;
    FrameMaker frames;
    PushStream stream;
    const std::shared_ptr<RecordingStream> answers = std::make_shared<RecordingStream>();
    std::shared_ptr<Outbox> out;
  };

  SkipTest() {
    subject_->Set(&environment_);
    environment_.clock = &clock_;
    environment_.frame_limit_bytes = 1 << 20;
    environment_.job_memory_limit_bytes = 1 << 28;
  }
  ~SkipTest() override {
    if (shard_ != nullptr) shard_->Shut(absl::CancelledError("the test ends"));
  }

  void Start(const v1::JobSpec& spec, uint32_t shards) {
    spec_ = spec;
    auto made = JobShard::Make(spec, 0, shards, environment_);
    ASSERT_TRUE(made.ok()) << made.status();
    shard_ = *made;
    shard_->log().SetSink(std::make_unique<SeenAtOnceSink>(&records_));
    a_ = std::make_unique<Pusher>(shard_.get(), spec, "a");
    b_ = std::make_unique<Pusher>(shard_.get(), spec, "b");
    for (uint32_t k = 0; k < a_->frames.buckets(); ++k) a_->Push(a_->frames.Initialize(k, 1.0f));
    for (Pusher* w : {a_.get(), b_.get()}) w->PushAll(0, 1.0f);
    for (Pusher* w : {a_.get(), b_.get()}) w->Follow(1);
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
    a_->PushAll(round, 2.0f);
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
  v1::JobStatus Status(bool digest = false) { return shard_->Describe(false, digest); }

  SteadyClock clock_;
  const std::unique_ptr<testing_support::Subject> subject_ = testing_support::MakeSubject();
  JobEnvironment environment_;
  v1::JobSpec spec_;
  std::vector<journal::Record> records_;
  std::shared_ptr<JobShard> shard_;
  std::unique_ptr<Pusher> a_, b_;
};

TEST_F(SkipTest, OneWorkersFlagSkipsTheRoundOfAllBuckets) {
  Start(SkippingSpec(), 1);
  const std::string before = Status(true).parameters_sha256();
  PushRound(1, true);
  AwaitVersion(2);
  EXPECT_EQ(Status(true).parameters_sha256(), before);
  EXPECT_EQ(Status().rounds().nonfinite_rounds(), 1u);
  for (const auto& worker : {a_.get(), b_.get()}) {
    for (const Update& update : worker->Follow(2)) {
      EXPECT_TRUE(update.skipped);
      EXPECT_EQ(update.nonfinite_rounds, 1u);
    }
  }
  PushRound(2, false);
  AwaitVersion(3);
  EXPECT_NE(Status(true).parameters_sha256(), before);
  for (const Update& update : a_->Follow(3)) {
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
  v1::WorkerIdentity a;
  a.set_job(spec_.name());
  a.set_worker("a");
  a.set_incarnation(1);
  ASSERT_TRUE(shard_->CatchUp(a, {.round = 1}, 6).ok());
  for (uint64_t round = 2; round < 6; ++round) {
    b_->PushAll(round, 2.0f);
    AwaitVersion(round + 1);
  }
  for (const Update& update : a_->Follow(2)) EXPECT_TRUE(update.skipped);
  v1::PullRequest applied;
  applied.set_kind(v1::PULL_UPDATE);
  applied.set_version(3);
  applied.set_bucket_end(1);
  a_->answers->sent.clear();
  EXPECT_TRUE(shard_->desk().Pull(a_->stream.member, applied, a_->out).ok());
  ASSERT_EQ(a_->answers->sent.size(), 1u);
  v1::PullMessage control;
  EXPECT_TRUE(control.ParseFromString(a_->answers->sent[0].control));
  EXPECT_EQ(control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
}

// Five workers are away, each since another skipped round; four of these are kept.
TEST_F(SkipTest, WhoIsAwayForTooLongIsToldThatItIsNotKnown) {
  constexpr uint64_t kAway = 5;
  v1::JobSpec spec = SmallSpec("job", kAway + 1);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  auto made = JobShard::Make(spec, 0, 1, environment_);
  ASSERT_TRUE(made.ok()) << made.status();
  shard_ = *made;
  shard_->log().SetSink(std::make_unique<SeenAtOnceSink>(&records_));
  std::vector<std::unique_ptr<Pusher>> workers;
  for (uint64_t w = 0; w <= kAway; ++w)
    workers.push_back(std::make_unique<Pusher>(shard_.get(), spec, std::string(1, static_cast<char>('a' + w))));
  Pusher& stays = *workers.back();
  for (uint32_t k = 0; k < stays.frames.buckets(); ++k) workers[0]->Push(workers[0]->frames.Initialize(k, 1.0f));
  for (const auto& worker : workers) worker->PushAll(0, 1.0f);
  uint64_t round = 1;
  for (uint64_t gone = 0; gone < kAway; ++gone, ++round) {
    for (uint64_t w = gone; w < kAway; ++w) workers[w]->PushAll(round, 2.0f);
    for (uint32_t k = 0; k < stays.frames.buckets(); ++k)
      stays.Push(stays.frames.Abstain(k, round, /*nonfinite=*/true));
    AwaitVersion(round + 1);
    v1::WorkerIdentity identity;
    identity.set_job(spec.name());
    identity.set_worker(workers[gone]->stream.worker);
    identity.set_incarnation(1);
    ASSERT_TRUE(shard_->CatchUp(identity, {.round = round}, 50).ok());
  }
  for (; round < kAway + 4; ++round) {
    stays.PushAll(round, 2.0f);
    AwaitVersion(round + 1);
  }
  for (uint64_t w = 0; w < kAway; ++w) {
    v1::PullRequest request;
    request.set_kind(v1::PULL_UPDATE);
    request.set_version(w + 2);
    request.set_bucket_end(1);
    workers[w]->answers->sent.clear();
    EXPECT_TRUE(shard_->desk().Pull(workers[w]->stream.member, request, workers[w]->out).ok());
    ASSERT_EQ(workers[w]->answers->sent.size(), 1u);
    v1::PullMessage answer;
    EXPECT_TRUE(answer.ParseFromString(workers[w]->answers->sent[0].control));
    EXPECT_EQ(answer.code(), static_cast<int>(w == 0 ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)) << w;
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
    for (const Update& update : a_->Follow(2)) EXPECT_EQ(update.skipped, c.skipped);
    // A peer that is started again is told what was agreed on.
    const v1::RoundFate agreed = c.skipped ? v1::FATE_SKIPPED : v1::FATE_APPLIED;
    EXPECT_EQ(Tell(1, v1::FATE_UNSPECIFIED)->sums().fate(), agreed);
    // And so it is by this shard when it is.
    auto recovered = JobShard::Make(spec_, 0, 2, environment_);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    const absl::Status replayed = (*recovered)->recovery().Recover(nullptr, [&](const Recovery::RecordVisitor& visit) {
      absl::Status status;
      for (const journal::Record& record : records_) status.Update(visit(record));
      return status;
    });
    ASSERT_TRUE(replayed.ok()) << replayed;
    const v1::JobStatus again = (*recovered)->Describe(false, true);
    EXPECT_EQ(again.parameters_sha256(), Status(true).parameters_sha256());
    EXPECT_EQ(again.rounds().nonfinite_rounds(), c.skipped ? 1u : 0u);
    shard_->Shut(absl::CancelledError("replaced"));
    shard_ = *recovered;
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
  auto recovered = JobShard::Make(spec_, 0, 2, environment_);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  ASSERT_TRUE((*recovered)
                  ->recovery()
                  .Recover(nullptr,
                           [&](const Recovery::RecordVisitor& visit) {
                             absl::Status status;
                             for (const journal::Record& record : records_) status.Update(visit(record));
                             return status;
                           })
                  .ok());
  shard_->Shut(absl::CancelledError("replaced"));
  shard_ = *recovered;
  // Nobody flags it this time.
  for (Pusher* worker : {a_.get(), b_.get()}) {
    Pusher again(shard_.get(), spec_, worker->stream.worker, 1);
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
