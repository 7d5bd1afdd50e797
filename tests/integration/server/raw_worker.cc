// See raw_worker.h.
#include "tests/integration/server/raw_worker.h"

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/base/status_macros.h"

namespace gradwire::testing_support {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);
constexpr int64_t kCallTimeoutMs = 10'000;

template <typename Reply, typename Request>
absl::StatusOr<Reply> Call(transport::Channel& channel, transport::Method method, const Request& request) {
  GW_ASSIGN_OR_RETURN(const std::string bytes, channel.Call(method, request.SerializeAsString(), kCallTimeoutMs));
  Reply reply;
  if (!reply.ParseFromString(bytes)) return absl::InternalError("the reply cannot be parsed");
  return reply;
}

}  // namespace

void Inbox::OnMessage(transport::Message message) {
  absl::MutexLock lock(&mu_);
  messages_.push_back(std::move(message));
}

void Inbox::OnClosed(absl::Status status) {
  absl::MutexLock lock(&mu_);
  closed_ = std::move(status);
}

absl::StatusOr<transport::Message> Inbox::Next() {
  absl::MutexLock lock(&mu_);
  auto event = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !messages_.empty() || closed_.has_value(); };
  if (!mu_.AwaitWithTimeout(absl::Condition(&event), kPatience)) return absl::DeadlineExceededError("nothing came");
  if (messages_.empty()) return closed_->ok() ? absl::OutOfRangeError("the stream has ended") : *closed_;
  transport::Message message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

absl::Status Inbox::Closed() {
  absl::MutexLock lock(&mu_);
  auto event = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return closed_.has_value(); };
  if (!mu_.AwaitWithTimeout(absl::Condition(&event), kPatience)) return absl::DeadlineExceededError("still open");
  return *closed_;
}

void Inbox::Clear() {
  absl::MutexLock lock(&mu_);
  messages_.clear();
  closed_.reset();
}

RawWorker::RawWorker(const std::string& address, const v1::JobSpec& spec, const std::string& name, uint64_t incarnation)
    : spec_(spec), frames_(spec, 0, 1, incarnation), channel_(*transport::Dial(address)) {
  identity_.set_job(spec.name());
  identity_.set_worker(name);
  identity_.set_incarnation(incarnation);
}

RawWorker::~RawWorker() {
  push_.reset();
  pull_.reset();
}

v1::JoinRequest RawWorker::JoinRequest() const {
  v1::JoinRequest request;
  *request.mutable_identity() = identity_;
  *request.mutable_spec() = spec_;
  request.set_shard_count(1);
  request.set_layout_digest(frames_.layout().digest());
  request.set_may_initialize(true);
  return request;
}

absl::StatusOr<v1::JoinReply> RawWorker::Join(const v1::JoinRequest& request) {
  absl::StatusOr<v1::JoinReply> reply = Call<v1::JoinReply>(*channel_, "gradwire.v1.Worker/Join", request);
  if (reply.ok()) lineage_ = reply->lineage();
  return reply;
}

absl::StatusOr<v1::JoinReply> RawWorker::Resume(const std::string& address, uint64_t round, uint64_t known_epoch) {
  push_.reset();
  pull_.reset();
  push_inbox_.Clear();
  pull_inbox_.Clear();
  channel_ = *transport::Dial(address);
  v1::JoinRequest request = JoinRequest();
  request.set_resume(true);
  request.set_resume_round(round);
  request.set_known_epoch(known_epoch);
  request.set_known_lineage(lineage_);
  GW_ASSIGN_OR_RETURN(const v1::JoinReply reply, Join(request));
  GW_RETURN_IF_ERROR(Open());
  return reply;
}

absl::Status RawWorker::Heartbeat() {
  v1::HeartbeatRequest request;
  *request.mutable_identity() = identity_;
  request.set_may_initialize(true);
  return Call<v1::HeartbeatReply>(*channel_, "gradwire.v1.Worker/Heartbeat", request).status();
}

absl::Status RawWorker::Leave() {
  v1::LeaveRequest request;
  *request.mutable_identity() = identity_;
  return Call<v1::LeaveReply>(*channel_, "gradwire.v1.Worker/Leave", request).status();
}

absl::Status RawWorker::Open() {
  v1::PushMessage push;
  *push.mutable_open() = identity_;
  GW_ASSIGN_OR_RETURN(push_, channel_->Open("gradwire.v1.Worker/Push", &push_inbox_));
  GW_RETURN_IF_ERROR(push_->Send({push.SerializeAsString(), {}}));
  v1::PullRequest pull;
  *pull.mutable_open() = identity_;
  GW_ASSIGN_OR_RETURN(pull_, channel_->Open("gradwire.v1.Worker/Pull", &pull_inbox_));
  return pull_->Send({pull.SerializeAsString(), {}});
}

absl::Status RawWorker::Send(const std::vector<Bytes>& chunks) {
  for (const Bytes& chunk : chunks) GW_RETURN_IF_ERROR(push_->Send({"", {chunk}}));
  return absl::OkStatus();
}

absl::StatusOr<v1::PushAck> RawWorker::NextAck() {
  GW_ASSIGN_OR_RETURN(const transport::Message message, push_inbox_.Next());
  v1::PushAck ack;
  if (!ack.ParseFromString(message.control)) return absl::InternalError("the acknowledgement cannot be parsed");
  return ack;
}

absl::StatusOr<v1::PushAck> RawWorker::Push(const std::vector<Bytes>& chunks) {
  GW_RETURN_IF_ERROR(Send(chunks));
  return NextAck();
}

absl::Status RawWorker::RequestPull(v1::PullKind kind, uint64_t version) {
  v1::PullRequest request;
  request.set_kind(kind);
  request.set_version(version);
  request.set_bucket_end(frames_.buckets());
  return pull_->Send({request.SerializeAsString(), {}});
}

absl::StatusOr<Answer> RawWorker::NextAnswer() {
  Answer answer;
  do {
    GW_ASSIGN_OR_RETURN(const transport::Message message, pull_inbox_.Next());
    if (!answer.control.ParseFromString(message.control)) return absl::InternalError("the answer cannot be parsed");
    answer.chunks.push_back(wire::Flatten(message.frame));
  } while (!answer.control.last());
  return answer;
}

absl::Status RawWorker::Start(float value) {
  GW_ASSIGN_OR_RETURN(const v1::JoinReply joined, Join());
  GW_RETURN_IF_ERROR(Open());
  if (!joined.must_initialize()) return absl::OkStatus();
  for (uint32_t b = 0; b < frames_.buckets(); ++b) {
    GW_ASSIGN_OR_RETURN(const v1::PushAck ack, Push(frames_.Initialize(b, value)));
    if (ack.outcome() != v1::PUSH_INCLUDED) return absl::InternalError(ack.message());
  }
  return absl::OkStatus();
}

absl::Status RawWorker::PushAll(uint64_t round, float value) {
  for (uint32_t b = 0; b < frames_.buckets(); ++b)
    GW_RETURN_IF_ERROR(PushIncluded(round, frames_.Push(b, round, value)));
  return absl::OkStatus();
}

absl::Status RawWorker::ReplaceAll(uint64_t round, float value) {
  for (uint32_t b = 0; b < frames_.buckets(); ++b)
    GW_RETURN_IF_ERROR(PushIncluded(round, frames_.Replace(b, round, value)));
  return absl::OkStatus();
}

absl::Status RawWorker::PushIncluded(uint64_t round, const std::vector<Bytes>& frame) {
  GW_ASSIGN_OR_RETURN(const v1::PushAck ack, Push(frame));
  if (ack.outcome() == v1::PUSH_INCLUDED) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("round %d bucket %d: outcome %d: %s", round, ack.bucket(),
                                             static_cast<int>(ack.outcome()), ack.message()));
}

absl::StatusOr<uint32_t> RawWorker::FollowUpdate(uint64_t version, bool requested) {
  if (!requested) GW_RETURN_IF_ERROR(RequestPull(v1::PULL_UPDATE, version));
  uint32_t contributors = 0;
  for (uint32_t i = 0; i < frames_.buckets(); ++i) {
    GW_ASSIGN_OR_RETURN(const Answer answer, NextAnswer());
    if (answer.control.code() != 0) {
      return absl::Status(static_cast<absl::StatusCode>(answer.control.code()), answer.control.message());
    }
    GW_ASSIGN_OR_RETURN(const Update update, frames_.Follow(answer.control.bucket(), answer.chunks));
    if (answer.control.bucket() == 0) contributors = update.contributors;
  }
  return contributors;
}

absl::StatusOr<v1::JobStatus> DescribeJob(transport::Channel& channel, const std::string& job, bool digest) {
  v1::DescribeJobRequest request;
  request.set_job(job);
  request.set_digest(digest);
  return Call<v1::JobStatus>(channel, "gradwire.v1.Operator/DescribeJob", request);
}

}  // namespace gradwire::testing_support
