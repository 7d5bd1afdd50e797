// Peers that ask for more than their share: what they may hold is bounded, and what cannot be had is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <functional>
#include <optional>
#include <thread>

#include "absl/time/time.h"
#include "common/base/start_thread.h"
#include "common/base/work_pool.h"
#include "common/transport/sink_scope.h"
#include "server/job/job_registry.h"
#include "server/norms/address_votes.h"
#include "server/norms/tellers.h"
#include "server/services/dispatcher.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/small_environment.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FrameMaker;
using testing_support::RecordingStream;
using testing_support::SmallSpec;
using testing_support::WithHeader;

// While it lives no thread can be started: the stack that each asks for does not fit any address space.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 46);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

v1::JobSpec ForTwo() {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_max_workers(2);
  return spec;
}

class AbuseTest : public testing::Test {
 protected:
  AbuseTest()
      : spec_(ForTwo()),
        backend_(std::move(*kernels::MakeBackend("cpu"))),
        registry_(testing_support::SmallEnvironment(backend_.get(), &clock_), {.memory_bytes = 1 << 28, .max_jobs = 4}),
        replication_({}, &registry_, nullptr, &clock_),
        worker_(&registry_, &replication_),
        frames_(spec_, 0, 1, 7),
        identity_(testing_support::IdentityOf("job", "a", 7)) {}
  void Join() {
    v1::JoinRequest request;
    *request.mutable_identity() = identity_;
    *request.mutable_spec() = spec_;
    request.set_shard_count(1);
    request.set_may_initialize(true);
    const auto joined = worker_.Call("Join", request.SerializeAsString());
    ASSERT_TRUE(joined.ok()) << joined.status();
  }
  std::unique_ptr<transport::StreamSink> Open(std::string_view method,
                                              const std::shared_ptr<transport::Stream>& stream) {
    return OpenAs(identity_, method, stream);
  }
  std::unique_ptr<transport::StreamSink> OpenAs(const v1::WorkerIdentity& identity, std::string_view method,
                                                const std::shared_ptr<transport::Stream>& stream) {
    auto sink = worker_.Accept(method, stream);
    EXPECT_TRUE(sink.ok()) << sink.status();
    v1::PushMessage open;  // field 1 of either
    *open.mutable_open() = identity;
    (*sink)->OnMessage({open.SerializeAsString(), {}});
    return *std::move(sink);
  }
  // Joins, uploads and opens a stream of pulls.
  void Begin() {
    ASSERT_NO_FATAL_FAILURE(Join());
    push_ = Open("Push", pushed_);
    for (uint32_t b = 0; b < frames_.buckets(); ++b) {
      push_->OnMessage({std::string(), {frames_.Initialize(b, 1.0f)[0]}});
    }
    pushed_->sent.clear();
    pull_ = Open("Pull", pulled_);
  }
  void End() {
    if (pull_ != nullptr) pull_->OnClosed(absl::OkStatus());
    if (push_ != nullptr) push_->OnClosed(absl::OkStatus());
  }
  std::string PullOf(v1::PullKind kind) const {
    v1::PullRequest request;
    request.set_kind(kind);
    request.set_bucket_end(frames_.buckets());
    return request.SerializeAsString();
  }
  // The codes of the answers that were sent since the last call, in order.
  std::vector<int> TakeCodes() {
    std::vector<int> codes;
    for (const transport::Message& message : pulled_->sent) {
      v1::PullMessage answer;
      EXPECT_TRUE(answer.ParseFromString(message.control));
      if (answer.last()) codes.push_back(answer.code());
    }
    pulled_->sent.clear();
    return codes;
  }

  v1::JobSpec spec_;
  SteadyClock clock_;
  std::unique_ptr<kernels::Backend> backend_;
  JobRegistry registry_;
  Replication replication_;
  WorkerService worker_;
  FrameMaker frames_;
  const v1::WorkerIdentity identity_;
  std::shared_ptr<RecordingStream> pushed_ = std::make_shared<RecordingStream>();
  std::shared_ptr<RecordingStream> pulled_ = std::make_shared<RecordingStream>();
  std::unique_ptr<transport::StreamSink> push_;
  std::unique_ptr<transport::StreamSink> pull_;
};

TEST_F(AbuseTest, AFrameThatAsksTwiceForTheSameEndsItsStream) {
  Begin();
  v1::PushMessage message;
  for (int i = 0; i < 500; ++i) {
    message.add_pull(v1::PULL_PARAMS_F32);
    message.add_pull(v1::PULL_PARAMS_BF16);
  }
  push_->OnMessage({message.SerializeAsString(), {frames_.Abstain(0, 0)[0]}});
  ASSERT_TRUE(pushed_->finished.has_value());
  EXPECT_EQ(pushed_->finished->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(pushed_->finished->message(), HasSubstr("once for each kind"));
  End();
}

TEST_F(AbuseTest, AnswersThatNobodyReadsAreBoundedWhicheverWayTheyAreAskedFor) {
  Begin();
  const std::vector<v1::PullKind> kinds = {v1::PULL_PARAMS_F32, v1::PULL_PARAMS_BF16, v1::PULL_STATE};
  for (int i = 0; i < 100; ++i) pull_->OnMessage({PullOf(kinds[i % 3]), {}});
  uint64_t held = 0;
  for (const transport::Message& message : pulled_->sent) held += TotalSize(message.frame);
  const std::vector<int> codes = TakeCodes();
  ASSERT_EQ(codes.size(), 100 * frames_.buckets());
  EXPECT_EQ(codes.front(), 0);
  EXPECT_EQ(codes.back(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_GT(held, 0u);
  EXPECT_LT(held, 1u << 18) << "of 100 times the parameters";
  pull_->OnMessage({PullOf(v1::PULL_PARAMS_F32), {}});
  EXPECT_THAT(TakeCodes(), testing::Each(0)) << "what was let go of counts no longer";
  End();
}

TEST_F(AbuseTest, TheStreamsOfOneMemberAreCounted) {
  ASSERT_NO_FATAL_FAILURE(Join());
  std::vector<std::shared_ptr<RecordingStream>> streams;
  std::vector<std::unique_ptr<transport::StreamSink>> sinks;
  for (size_t i = 0; i <= MemberStreams::kMaxPerMember; ++i) {
    streams.push_back(std::make_shared<RecordingStream>());
    sinks.push_back(Open("Pull", streams.back()));
    EXPECT_EQ(streams.back()->finished.has_value(), i == MemberStreams::kMaxPerMember);
  }
  EXPECT_EQ(streams.back()->finished->code(), absl::StatusCode::kResourceExhausted);
  sinks.front()->OnClosed(absl::OkStatus());
  auto again = std::make_shared<RecordingStream>();
  auto sink = Open("Pull", again);
  EXPECT_FALSE(again->finished.has_value());
  for (size_t i = 1; i < sinks.size(); ++i) sinks[i]->OnClosed(absl::OkStatus());
  sink->OnClosed(absl::OkStatus());
}

// Notes whether a send might have waited for its reader.
class PatientStream final : public transport::Stream {
 public:
  absl::Status Send(transport::Message) override {
    (transport::SinkScope::Any() ? never_waited : may_wait) = true;
    return absl::OkStatus();
  }
  void Finish(absl::Status) override {}
  void Cancel() override {}
  bool never_waited = false;
  bool may_wait = false;
};

// What a worker may do that closes the round which waited for it alone.
struct WayOut {
  const char* name;
  std::function<absl::Status(JobShard& job, const v1::WorkerIdentity& worker)> take;
};

class DeliveryTest : public AbuseTest, public testing::WithParamInterface<WayOut> {};

TEST_P(DeliveryTest, WhoeverDeliversNeverWaitsForAReader) {
  Begin();
  v1::WorkerIdentity other = identity_;
  other.set_worker("b");
  other.set_incarnation(8);
  const FrameMaker others_frames(spec_, 0, 1, 8);
  const std::shared_ptr<JobShard> job = *registry_.Find("job");
  ASSERT_TRUE(job->Join(other, 0, false).ok());  // from round 1 on
  auto others_push = OpenAs(other, "Push", std::make_shared<RecordingStream>());
  auto patient = std::make_shared<PatientStream>();
  auto pull = Open("Pull", patient);
  v1::PullRequest request;
  request.set_kind(v1::PULL_UPDATE);
  request.set_version(4);
  request.set_bucket_end(frames_.buckets());
  pull->OnMessage({request.SerializeAsString(), {}});
  for (uint64_t round = 0; round < 4; ++round) {
    for (uint32_t b = 0; b < frames_.buckets(); ++b) {
      push_->OnMessage({std::string(), {frames_.Abstain(b, round)[0]}});
      if (round == 1 || round == 2) others_push->OnMessage({std::string(), {others_frames.Abstain(b, round)[0]}});
    }
  }
  others_push->OnClosed(absl::OkStatus());
  ASSERT_EQ(job->Describe(false, false).version(), 3u);
  EXPECT_FALSE(patient->never_waited);
  // Round 3 waits for nobody but `other`, whose next step closes it: on this thread, which is in no sink.
  const absl::Status taken = GetParam().take(*job, other);
  ASSERT_TRUE(taken.ok()) << taken;
  EXPECT_TRUE(patient->never_waited);
  EXPECT_FALSE(patient->may_wait);
  pull->OnClosed(absl::OkStatus());
  End();
}

INSTANTIATE_TEST_SUITE_P(All, DeliveryTest,
                         testing::Values(WayOut{"Leave",
                                                [](JobShard& job, const v1::WorkerIdentity& worker) {
                                                  v1::LeaveRequest leave;
                                                  *leave.mutable_identity() = worker;
                                                  return job.Leave(leave);
                                                }},
                                         WayOut{"JoinAnew",
                                                [](JobShard& job, v1::WorkerIdentity worker) {
                                                  worker.set_incarnation(worker.incarnation() + 1);
                                                  return job.Join(worker, 4, false).status();
                                                }},
                                         WayOut{"Resume",
                                                [](JobShard& job, const v1::WorkerIdentity& worker) {
                                                  Rounds::ResumePoint long_ago;
                                                  long_ago.round = 1;
                                                  return job.Resume(worker, long_ago).status();
                                                }},
                                         WayOut{"CatchUp",
                                                [](JobShard& job, const v1::WorkerIdentity& worker) {
                                                  return job.CatchUp(worker, {}, 5).status();
                                                }}),
                         [](const auto& info) { return info.param.name; });

TEST_F(AbuseTest, AnUploadHoldsNoMoreThanItsBucket) {
  ASSERT_NO_FATAL_FAILURE(Join());
  push_ = Open("Push", pushed_);
  const Bytes whole = frames_.Initialize(0, 1.0f)[0];  // as if it were the first chunk of many
  constexpr size_t kFlags = 6;
  constexpr size_t kChunk = 24;
  const uint64_t most = MaxUploadBytes(frames_.at(0).elements);
  uint64_t sent = 0;
  for (uint32_t chunk = 0; pushed_->sent.empty() && sent < 16 * most; ++chunk) {
    sent += whole.size();
    push_->OnMessage({std::string(), {WithHeader(WithHeader(whole, kFlags, uint16_t{0}), kChunk, chunk)}});
  }
  ASSERT_EQ(pushed_->sent.size(), 1u);
  v1::PushAck ack;
  ASSERT_TRUE(ack.ParseFromString(pushed_->sent[0].control));
  EXPECT_EQ(ack.code(), static_cast<int>(absl::StatusCode::kResourceExhausted)) << ack.message();
  EXPECT_LE(sent, most + whole.size());
  EXPECT_EQ((*registry_.Find("job"))->MeasureMemory().unfinished, 0u);
  End();
}

TEST_F(AbuseTest, WhereNoThreadCanBeHadAJobIsRefusedAndTheNextOneWorks) {
  v1::JobSpec spec = SmallSpec("lans", 1);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_LANS);
  {
    const NoThreads none;
    EXPECT_EQ(StartThread("a test", [] {}).status().code(), absl::StatusCode::kResourceExhausted);
    const auto refused = registry_.GetOrCreate(spec, 0, 2, 0);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(refused.status().message(), HasSubstr("no thread"));
    bool done = false;
    WorkPool(2).Do([&done] { done = true; });
    EXPECT_TRUE(done) << "by the caller itself";
  }
  EXPECT_EQ(registry_.memory_bytes(), 0u);
  EXPECT_TRUE(registry_.GetOrCreate(spec, 0, 2, 0).ok());
}

TEST_F(AbuseTest, ADigestIsComputedOnceForAllWhoWaitAndAnewWhenTheParametersAreOthers) {
  Begin();
  const std::shared_ptr<JobShard> job = *registry_.Find("job");
  const std::string before = *job->digest().Get();
  std::vector<std::string> digests(8);
  std::vector<std::thread> threads;
  for (std::string& digest : digests) threads.emplace_back([&] { digest = *job->digest().Get(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(digests, testing::Each(before));
  for (uint64_t round : {0, 1}) {
    for (uint32_t b = 0; b < frames_.buckets(); ++b) {
      push_->OnMessage({std::string(), {frames_.Push(b, round, 1.0f)[0]}});
    }
  }
  EXPECT_EQ(job->Describe(false, false).version(), 2u);
  EXPECT_NE(*job->digest().Get(), before);
  job->Shut(absl::AbortedError("gone"));
  EXPECT_EQ(*job->digest().Get(), *job->digest().Get());
  End();
}

TEST(AddressVotes, OneMemberDoesNotDecideForTheOthers) {
  AddressVotes votes;
  const std::vector<std::string> here = {"a", "b"}, there = {"x", "y"};
  votes.Vote(1, here);
  EXPECT_EQ(votes.current(), here);
  votes.Vote(2, there);
  EXPECT_EQ(votes.current(), here) << "as many say so as say otherwise";
  votes.Vote(1, there);
  EXPECT_EQ(votes.current(), there) << "the shards have moved";
  for (MemberId stranger = 10; stranger < 40; ++stranger) votes.Vote(stranger, {"s" + std::to_string(stranger), "y"});
  EXPECT_EQ(votes.current(), there);
  votes.Vote(1, here);
  votes.Vote(2, here);
  EXPECT_EQ(votes.current(), here) << "whatever strangers say";
  for (MemberId member = 40; member-- > 0;) votes.Forget(member);
  EXPECT_EQ(votes.current(), here);
  votes.Vote(3, there);
  EXPECT_EQ(votes.current(), there);
}

// Tells targets that answer only when they are let go, but for `quick` ones.
class StubbornTargets final : public Telling {
 public:
  StubbornTargets(size_t targets, bool proven) : left_(targets), proven_(proven) {}
  Next TakeNext(bool unproven, absl::Time) override {
    absl::MutexLock lock(&mu_);
    if (left_ == 0 || (!unproven && !proven_)) return {};
    --left_;
    Next next;
    next.to = left_;
    next.proven = proven_;
    return next;
  }
  void Tell(size_t) override {
    absl::MutexLock lock(&mu_);
    ++told_;
    if (!proven_) mu_.Await(absl::Condition(&let_go_));
  }
  void LetGo() {
    absl::MutexLock lock(&mu_);
    let_go_ = true;
  }
  // False where they are not told within a time that only a hang takes.
  bool AwaitTold(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto told = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return told_ >= count; };
    return mu_.AwaitWithTimeout(absl::Condition(&told), absl::Seconds(30));
  }

 private:
  absl::Mutex mu_;
  size_t left_;
  const bool proven_;
  size_t told_ = 0;
  bool let_go_ = false;
};

TEST(Tellers, ThousandsWhoDoNotAnswerHoldUpNobodyElse) {
  Tellers tellers;
  std::vector<std::unique_ptr<StubbornTargets>> silent;
  for (size_t job = 0; job < Tellers::kUnproven / Tellers::kUnprovenOfOne + 2; ++job) {
    silent.push_back(std::make_unique<StubbornTargets>(4096, false));
    ASSERT_TRUE(tellers.Add(silent.back().get()).ok());
    tellers.Wake();
  }
  StubbornTargets answering(100, true);
  ASSERT_TRUE(tellers.Add(&answering).ok());
  tellers.Wake();
  EXPECT_TRUE(answering.AwaitTold(100));
  EXPECT_LE(tellers.threads(), Tellers::kThreads);
  tellers.Remove(&answering);
  for (const auto& targets : silent) targets->LetGo();
  for (const auto& targets : silent) tellers.Remove(targets.get());
}

}  // namespace
}  // namespace gradwire
