// One job without a transport, and workers of it that are moved by hand: for tests of server/job.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/codec/update/update.h"
#include "server/job/job_shard.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/small_environment.h"
#include "tests/unit/server/subject.h"

namespace gradwire::testing_support {

inline constexpr TimeNs kMs = 1'000'000;

struct Answered {
  v1::PullMessage control;
  std::vector<Bytes> chunks;
};

// One worker of the test: its frames, its push stream and its pull stream.
struct TestWorker {
  TestWorker(JobShard* shard, const v1::JobSpec& spec, const std::string& name, uint64_t incarnation)
      : shard(shard),
        frames(spec, shard->shard_index(), shard->layout().shard_count(), incarnation),
        identity(IdentityOf(spec.name(), name, incarnation)) {}
  absl::StatusOr<v1::JoinReply> Join() {
    auto reply = shard->Join(identity, 0, true);
    if (reply.ok()) Attach();
    return reply;
  }
  // The streams of a member.
  void Attach() {
    pull = std::make_shared<RecordingStream>();
    out = std::make_shared<Outbox>(pull);
    stream.member = *shard->Attach(identity, out);
    stream.incarnation = identity.incarnation();
    stream.worker = identity.worker();
    stream.out = out;
  }
  v1::HeartbeatRequest HeartbeatRequest(uint64_t sanitized_elements = 0) const {
    v1::HeartbeatRequest request;
    *request.mutable_identity() = identity;
    request.set_may_initialize(true);
    request.set_sanitized_elements(sanitized_elements);
    return request;
  }
  v1::LeaveRequest LeaveRequest(uint64_t sanitized_elements = 0) const {
    v1::LeaveRequest request;
    *request.mutable_identity() = identity;
    request.set_sanitized_elements(sanitized_elements);
    return request;
  }
  // What a chunk is acknowledged with; nothing: it is not.
  std::optional<v1::PushAck> Chunk(const Bytes& chunk) {
    const auto ack = shard->intake().Take(stream, {&chunk, 1});
    EXPECT_TRUE(ack.ok()) << ack.status();
    return ack.ok() ? *ack : std::nullopt;
  }
  // The acknowledgement of the whole frame; fails the test when there is none.
  v1::PushAck Push(const std::vector<Bytes>& chunks) {
    for (const Bytes& chunk : chunks) {
      if (const auto ack = Chunk(chunk)) return *ack;
    }
    ADD_FAILURE() << "no acknowledgement";
    return {};
  }
  void Acknowledge(const v1::PushAck& ack, const std::vector<v1::PullKind>& kinds) {
    EXPECT_TRUE(shard->desk().AcknowledgeFrame(stream.member, ack, kinds, out).ok());
  }
  // What was sent by Acknowledge since the last call.
  std::vector<v1::PushAck> TakeAcks() {
    std::vector<v1::PushAck> acks(pull->sent.size());
    for (size_t i = 0; i < acks.size(); ++i) {
      EXPECT_TRUE(acks[i].ParseFromString(pull->sent[i].control));
      EXPECT_EQ(pull->sent[i].frame.empty(), acks[i].kind() == v1::PULL_UNSPECIFIED || acks[i].code() != 0);
    }
    pull->sent.clear();
    return acks;
  }
  // A frame that is not acknowledged yet.
  void PushUnanswered(const std::vector<Bytes>& chunks) {
    for (const Bytes& chunk : chunks) {
      const auto ack = Chunk(chunk);
      ASSERT_FALSE(ack.has_value()) << ack->DebugString();
    }
  }
  void InitializeAll(float value) {
    for (uint32_t b = 0; b < frames.buckets(); ++b) {
      EXPECT_EQ(Push(frames.Initialize(b, value)).outcome(), v1::PUSH_INCLUDED);
    }
  }
  // The same in a job with a sink that lets all be seen at once: acknowledgements come behind it.
  void InitializeAllRecorded(float value) {
    for (uint32_t b = 0; b < frames.buckets(); ++b) PushUnanswered(frames.Initialize(b, value));
    EXPECT_EQ(TakeAcks().size(), frames.buckets());
  }
  void Pull(v1::PullKind kind, uint64_t version, std::optional<uint32_t> bucket_end = {}) {
    v1::PullRequest request;
    request.set_kind(kind);
    request.set_version(version);
    request.set_bucket_end(bucket_end.value_or(frames.buckets()));
    EXPECT_TRUE(shard->desk().Pull(stream.member, request, out).ok());
  }
  std::vector<Answered> TakeAnswers() {
    std::vector<Answered> answers;
    std::vector<Bytes> chunks;
    for (const transport::Message& message : pull->sent) {
      Answered answer;
      EXPECT_TRUE(answer.control.ParseFromString(message.control));
      if (!message.frame.empty()) chunks.push_back(wire::Flatten(message.frame));
      if (!answer.control.last()) continue;
      answer.chunks.swap(chunks);
      answers.push_back(std::move(answer));
    }
    pull->sent.clear();
    return answers;
  }
  // Pulls the update that makes `version` of every bucket and follows its plan.
  std::vector<Update> FollowUpdate(uint64_t version) {
    Pull(v1::PULL_UPDATE, version);
    std::vector<Update> updates;
    for (const Answered& answer : TakeAnswers()) {
      EXPECT_EQ(answer.control.code(), 0) << answer.control.message();
      const auto update = frames.Follow(answer.control.bucket(), answer.chunks);
      EXPECT_TRUE(update.ok()) << update.status();
      if (update.ok()) updates.push_back(*update);
    }
    EXPECT_EQ(updates.size(), frames.buckets());
    return updates;
  }

  JobShard* shard;
  FrameMaker frames;
  v1::WorkerIdentity identity;
  PushStream stream;
  std::shared_ptr<RecordingStream> pull;
  std::shared_ptr<Outbox> out;
};

class JobShardTest : public testing::Test {
 protected:
  JobShardTest() { subject_->Set(&environment_); }
  // Shard 0 of the job, without anything in it.
  std::shared_ptr<JobShard> Make(uint32_t shards = 1) {
    auto shard = JobShard::Make(spec_, 0, shards, environment_);
    EXPECT_TRUE(shard.ok()) << shard.status();
    return shard.value_or(nullptr);
  }
  void Start(const v1::JobSpec& spec, uint32_t shards = 1) {
    spec_ = spec;
    shard_ = Make(shards);
    ASSERT_NE(shard_, nullptr);
  }
  TestWorker Worker(const std::string& name, uint64_t incarnation = 1) {
    return TestWorker(shard_.get(), spec_, name, incarnation);
  }
  // Two workers that have finished the calibration round.
  void StartTwo(TestWorker* a, TestWorker* b) {
    ASSERT_TRUE(a->Join().ok());
    ASSERT_TRUE(b->Join().ok());
    a->InitializeAll(1.0f);
    PushAll(a, 0, 1.0f);
    PushAll(b, 0, 1.0f);
    a->FollowUpdate(1);
    b->FollowUpdate(1);
  }
  void PushAll(TestWorker* w, uint64_t round, float value) {
    for (uint32_t k = 0; k < w->frames.buckets(); ++k) {
      const v1::PushAck ack = w->Push(w->frames.Push(k, round, value));
      ASSERT_EQ(ack.outcome(), v1::PUSH_INCLUDED) << ack.message();
    }
  }
  static std::string DigestOf(JobShard& shard) { return shard.Describe(false, true).parameters_sha256(); }
  std::string Digest() { return DigestOf(*shard_); }

  ManualClock clock_;
  const std::unique_ptr<Subject> subject_ = MakeSubject();  // sets the backend
  JobEnvironment environment_ = SmallEnvironment(nullptr, &clock_);
  v1::JobSpec spec_;
  std::shared_ptr<JobShard> shard_;
};

}  // namespace gradwire::testing_support
