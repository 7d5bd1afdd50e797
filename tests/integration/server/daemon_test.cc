// The daemon over real transports: every kind of bad input gets its own typed error, leaves the state as it was, and
// the other worker trains on.
#include "server/daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/server/raw_worker.h"
#include "tests/integration/server/slow_jobs.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::DescribeJob;
using testing_support::FlipBit;
using testing_support::HalfLostJob;
using testing_support::RawWorker;
using testing_support::SlowGate;
using testing_support::SlowJobs;
using testing_support::SmallSpec;

class DaemonTest : public testing::TestWithParam<std::string> {
 protected:
  void Start(uint64_t frame_limit_bytes = 1 << 20) {
    ServerConfig config;
    config.listen = {
        GetParam() == "inproc"
            ? absl::StrCat("inproc://daemon-test-", testing::UnitTest::GetInstance()->current_test_info()->name())
            : absl::StrCat(GetParam(), "://127.0.0.1:0")};
    config.backend = "cpu";
    config.frame_limit_bytes = frame_limit_bytes;
    ASSERT_TRUE(config.Validate().ok());
    auto daemon = Daemon::Start(config, &clock_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    address_ = daemon_->addresses()[0];
  }
  // Two workers that have finished the calibration round.
  void StartTwo(const v1::JobSpec& spec) {
    a_ = std::make_unique<RawWorker>(address_, spec, "a", 11);
    b_ = std::make_unique<RawWorker>(address_, spec, "b", 12);
    ASSERT_EQ(a_->Start(1.0f), absl::OkStatus());
    ASSERT_EQ(b_->Start(1.0f), absl::OkStatus());
    Step(0, 1.0f);
  }
  void Step(uint64_t round, float value) {
    ASSERT_EQ(a_->PushAll(round, value), absl::OkStatus());
    ASSERT_EQ(b_->PushAll(round, value), absl::OkStatus());
    ASSERT_EQ(a_->FollowUpdate(round + 1).status(), absl::OkStatus());
    ASSERT_EQ(b_->FollowUpdate(round + 1).status(), absl::OkStatus());
  }
  v1::JobStatus Status(const std::string& job = "job") {
    auto status = DescribeJob(a_->channel(), job, true);
    EXPECT_TRUE(status.ok()) << status.status();
    return status.value_or(v1::JobStatus());
  }
  // `a` sends a bad frame for bucket 0 of round 1; then round 1 must finish over b's frames (and a's others).
  void ExpectRefused(const std::vector<Bytes>& frame, absl::StatusCode code, const std::string& words) {
    const std::string before = Status().parameters_sha256();
    const auto ack = a_->Push(frame);
    ASSERT_TRUE(ack.ok()) << ack.status();
    EXPECT_EQ(ack->outcome(), v1::PUSH_REFUSED);
    EXPECT_EQ(static_cast<absl::StatusCode>(ack->code()), code) << ack->message();
    EXPECT_THAT(ack->message(), testing::AllOf(HasSubstr(words), HasSubstr("worker 'a'")));
    EXPECT_EQ(Status().parameters_sha256(), before);
    for (uint32_t k = 1; k < a_->frames().buckets(); ++k) {
      ASSERT_EQ(a_->Push(a_->frames().Push(k, 1, 2.0f))->outcome(), v1::PUSH_INCLUDED);
    }
    ASSERT_EQ(b_->PushAll(1, 2.0f), absl::OkStatus());
    const auto contributors = b_->FollowUpdate(2);
    ASSERT_TRUE(contributors.ok()) << contributors.status();
    EXPECT_EQ(*contributors, 1u);
    ASSERT_TRUE(a_->FollowUpdate(2).ok());
    Step(2, 1.0f);
    EXPECT_EQ(Status().version(), 3u);
  }

  SteadyClock clock_;
  std::string address_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<RawWorker> a_, b_;
};

INSTANTIATE_TEST_SUITE_P(Transports, DaemonTest, testing::Values("inproc", "grpc", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(DaemonTest, TwoWorkersTrain) {
  Start();
  StartTwo(SmallSpec("job", 2));
  const std::string before = Status().parameters_sha256();
  for (uint64_t round = 1; round < 5; ++round) Step(round, 1.0f);
  const v1::JobStatus status = Status();
  EXPECT_EQ(status.version(), 5u);
  EXPECT_NE(status.parameters_sha256(), before);
  EXPECT_EQ(status.workers_size(), 2);
  EXPECT_GT(status.push_bytes(), 0u);
  EXPECT_GT(status.pull_bytes(), 0u);
}

TEST_P(DaemonTest, UnknownJob) {
  Start();
  RawWorker a(address_, SmallSpec("job", 1), "a", 1);
  EXPECT_EQ(a.Heartbeat().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(a.Open().ok());
  EXPECT_EQ(a.push_inbox().Closed().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(a.pull_inbox().Closed().message()), HasSubstr("job 'job' does not exist"));
}

TEST_P(DaemonTest, NotJoined) {
  Start();
  StartTwo(SmallSpec("job", 2));
  RawWorker stranger(address_, SmallSpec("job", 2), "stranger", 1);
  EXPECT_EQ(stranger.Heartbeat().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(stranger.Open().ok());
  const absl::Status closed = stranger.push_inbox().Closed();
  EXPECT_EQ(closed.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(closed.message()), HasSubstr("join again"));
  Step(1, 1.0f);
}

TEST_P(DaemonTest, WrongLayoutDigest) {
  Start();
  RawWorker a(address_, SmallSpec("job", 1), "a", 1);
  ASSERT_TRUE(a.Join().ok());
  v1::JoinRequest request = a.JoinRequest();
  request.set_layout_digest(request.layout_digest() ^ 1);
  const absl::Status status = a.Join(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("digest"));
}

TEST_P(DaemonTest, WrongShapeAndDtype) {
  Start();
  StartTwo(SmallSpec("job", 2));
  v1::JobSpec other = SmallSpec("job", 2);
  other.mutable_tensors(1)->set_shape(1, 48);  // travels in bucket 0
  RawWorker c(address_, other, "c", 1);
  const absl::Status status = c.Join().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensors[1].shape[1]"));
  v1::JoinRequest request = c.JoinRequest();
  request.mutable_spec()->mutable_tensors(0)->set_dtype(static_cast<v1::DType>(7));
  EXPECT_EQ(c.Join(request).status().code(), absl::StatusCode::kInvalidArgument);
  // The same as a frame: made for another layout.
  testing_support::FrameMaker wrong(other, 0, 1, 11);
  ExpectRefused(wrong.Push(0, 1, 1.0f), absl::StatusCode::kFailedPrecondition, "another layout");
}

// What does not parse was damaged on its way: the stream ends, and the same frame is taken on the next one.
TEST_P(DaemonTest, ADamagedFrameComesAgainOnANewStream) {
  Start();
  StartTwo(SmallSpec("job", 2));
  const auto frame = a_->frames().Push(0, 1, 2.0f);
  const std::pair<Bytes, absl::StatusCode> damaged[] = {
      {frame[0].Slice(0, frame[0].size() - 16), absl::StatusCode::kInvalidArgument},
      {FlipBit(frame[0], 8 * frame[0].size() - 5), absl::StatusCode::kDataLoss}};
  for (const auto& [bytes, code] : damaged) {
    ASSERT_TRUE(a_->Send({bytes}).ok());
    const absl::Status why = a_->push_inbox().Closed();
    EXPECT_EQ(why.code(), code) << why;
    EXPECT_THAT(std::string(why.message()), testing::AllOf(HasSubstr("worker 'a'"), HasSubstr("push again")));
    ASSERT_TRUE(a_->Resume(address_, 1).ok());
  }
  ASSERT_EQ(a_->PushAll(1, 2.0f), absl::OkStatus());
  ASSERT_EQ(b_->PushAll(1, 2.0f), absl::OkStatus());
  const auto contributors = b_->FollowUpdate(2);
  ASSERT_TRUE(contributors.ok()) << contributors.status();
  EXPECT_EQ(*contributors, 2u) << "nobody abstained";
  ASSERT_TRUE(a_->FollowUpdate(2).ok());
  Step(2, 1.0f);
}

TEST_P(DaemonTest, FlippedBitInTheHeaderEndsTheStream) {
  Start();
  StartTwo(SmallSpec("job", 2));
  ASSERT_TRUE(a_->Send({FlipBit(a_->frames().Push(0, 1, 1.0f)[0], 130)}).ok());
  EXPECT_EQ(a_->push_inbox().Closed().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(a_->Leave().ok());
  ASSERT_EQ(b_->PushAll(1, 1.0f), absl::OkStatus());
  EXPECT_TRUE(b_->FollowUpdate(2).ok());
}

TEST_P(DaemonTest, NonFiniteGradient) {
  Start();
  StartTwo(SmallSpec("job", 2));
  ExpectRefused(a_->frames().Push(0, 1, std::numeric_limits<float>::quiet_NaN()), absl::StatusCode::kInvalidArgument,
                "weight");
}

TEST_P(DaemonTest, FrameOverTheLimit) {
  Start(64 << 10);
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.set_codec("dense:values=fp32");
  StartTwo(spec);
  // A header with the right identity, more bytes than any frame may have.
  wire::FrameHeader header;
  header.bucket = 0;
  header.round = 1;
  header.shape_digest = a_->frames().at(0).shape_digest;
  header.incarnation = 11;
  header.plan_digest = wire::ParseHeader(a_->frames().Push(0, 1, 1.0f)[0].span())->plan_digest;
  wire::FrameWriter writer(header);
  const std::vector<uint8_t> payload(70'000);
  writer.Add({wire::SegmentType::kDenseF32, 0, 0, 17'500, 70'000}, payload.data());
  ExpectRefused(writer.Finish(), absl::StatusCode::kResourceExhausted, "limit");
}

TEST_P(DaemonTest, RoundThatIsNotOpenAndRoundThatIsOver) {
  Start();
  StartTwo(SmallSpec("job", 2));
  const auto early = a_->Push(a_->frames().Push(0, 5, 1.0f));
  ASSERT_TRUE(early.ok());
  EXPECT_EQ(static_cast<absl::StatusCode>(early->code()), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(early->message(), testing::AllOf(HasSubstr("round 5"), HasSubstr("round 1")));
  const auto old_frame = a_->frames().Push(0, 1, 9.0f);
  Step(1, 1.0f);
  Step(2, 1.0f);
  Step(3, 1.0f);
  const auto late = a_->Push(old_frame);
  ASSERT_TRUE(late.ok());
  EXPECT_EQ(late->outcome(), v1::PUSH_NOT_INCLUDED);
  Step(4, 1.0f);
}

TEST_P(DaemonTest, BytesThatAreNoMessages) {
  Start();
  StartTwo(SmallSpec("job", 2));
  EXPECT_EQ(a_->channel().Call("gradwire.v1.Worker/Join", "\xff\xff\xff", 5000).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a_->channel().Call("gradwire.v1.Worker/NoSuch", "", 5000).status().code(),
            absl::StatusCode::kUnimplemented);
  ASSERT_TRUE(a_->Send({Bytes::Copy(std::vector<uint8_t>(100, 0xee))}).ok());
  EXPECT_EQ(a_->push_inbox().Closed().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(b_->Heartbeat().ok());
}

TEST_P(DaemonTest, NobodyTakesTheNameOfAWorkerThatIsConnected) {
  Start();
  StartTwo(SmallSpec("job", 2));
  RawWorker again(address_, SmallSpec("job", 2), "a", 99);
  const absl::Status refused = again.Join().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("a name of its own"));
  Step(1, 1.0f);
}

TEST_P(DaemonTest, AWorkerWhoseConnectionIsGoneIsReplaced) {
  Start();
  StartTwo(SmallSpec("job", 2));
  a_.reset();  // no word of leaving
  RawWorker again(address_, SmallSpec("job", 2), "a", 99);
  absl::Status joined = absl::AlreadyExistsError("not tried");
  const absl::Time bound = absl::Now() + absl::Seconds(30);
  while (absl::IsAlreadyExists(joined) && absl::Now() < bound) {  // the server hears of the end of its streams
    joined = again.Join().status();
  }
  EXPECT_EQ(joined, absl::OkStatus());
}

TEST_P(DaemonTest, SilentWorkerIsNotWaitedForAfterItsLease) {
  Start();
  StartTwo(SmallSpec("job", 2, "dense:values=fp32", 2000));
  ASSERT_EQ(b_->PushAll(1, 1.0f), absl::OkStatus());
  std::jthread alive([this](std::stop_token stop) {
    while (!stop.stop_requested()) EXPECT_EQ(b_->Heartbeat(), absl::OkStatus());
  });
  const auto contributors = b_->FollowUpdate(2);  // a stays silent
  ASSERT_TRUE(contributors.ok()) << contributors.status();
  EXPECT_EQ(*contributors, 1u);
  EXPECT_EQ(a_->Heartbeat().code(), absl::StatusCode::kNotFound);
  // It joins again and is a member from the next round on.
  alive.request_stop();
  alive.join();
  RawWorker again(address_, SmallSpec("job", 2, "dense:values=fp32", 2000), "a", 77);
  const auto joined = again.Join();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->start_version(), 3u);
  ASSERT_EQ(again.Open(), absl::OkStatus());
  ASSERT_EQ(b_->PushAll(2, 1.0f), absl::OkStatus());
  ASSERT_TRUE(b_->FollowUpdate(3).ok());
  ASSERT_EQ(again.RequestPull(v1::PULL_STATE, 3), absl::OkStatus());
  EXPECT_EQ(again.NextAnswer()->control.code(), 0);
  EXPECT_EQ(Status().version(), 3u);
}

TEST_P(DaemonTest, JobsThatCloseSlowlyHoldUpNoOther) {
  Start();
  const auto gate = std::make_shared<SlowGate>();
  const auto slow = SlowJobs(*daemon_, address_, gate);
  const absl::Cleanup opened = [&gate] { gate->Open(); };
  HalfLostJob quick(*daemon_, address_, "quick", nullptr);
  EXPECT_EQ(quick.Closed(), absl::OkStatus());
  gate->Open();
  for (const auto& job : slow) EXPECT_EQ(job->Closed(), absl::OkStatus());
}

TEST_P(DaemonTest, TwoJobsAtOnceDoNotDisturbEachOther) {
  Start();
  StartTwo(SmallSpec("job", 2));
  Step(1, 1.0f);
  const std::string alone = Status().parameters_sha256();
  RawWorker c(address_, SmallSpec("other", 1, "dense:values=fixed16"), "a", 11);
  ASSERT_EQ(c.Start(4.0f), absl::OkStatus());
  for (uint64_t round = 0; round < 3; ++round) {
    ASSERT_EQ(c.PushAll(round, 1.0f), absl::OkStatus());
    ASSERT_TRUE(c.FollowUpdate(round + 1).ok());
  }
  EXPECT_EQ(Status().parameters_sha256(), alone);
  EXPECT_EQ(Status("other").version(), 3u);
  ASSERT_TRUE(daemon_->registry().Delete("other").ok());
  EXPECT_EQ(c.push_inbox().Closed().code(), absl::StatusCode::kAborted);
  Step(2, 1.0f);
}

TEST_P(DaemonTest, DrainLetsTheOpenRoundFinishAndTakesNobody) {
  Start();
  StartTwo(SmallSpec("job", 2));
  ASSERT_EQ(a_->PushAll(1, 1.0f), absl::OkStatus());
  ASSERT_EQ(b_->RequestPull(v1::PULL_UPDATE, 2), absl::OkStatus());
  std::thread drain([this] { EXPECT_EQ(daemon_->Drain(8000), absl::OkStatus()); });
  RawWorker late(address_, SmallSpec("job", 2), "late", 5);
  absl::Status joined = absl::OkStatus();
  // Until the thread above has begun.
  for (int i = 0; i < 10'000 && joined.ok(); ++i) {
    joined = late.Join(late.JoinRequest()).status();
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(joined.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(b_->PushAll(1, 1.0f), absl::OkStatus());
  EXPECT_TRUE(b_->FollowUpdate(2, true).ok());
  drain.join();
  EXPECT_EQ(b_->push_inbox().Closed().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace gradwire
