// See shard_link.h.
#include "client/cpp/internal/shard_link.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/link_errors.h"
#include "client/cpp/internal/pull_answers.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"

namespace gradwire::client {
namespace {

constexpr int64_t kFirstBackoffMs = 50;
constexpr int64_t kLastBackoffMs = 1000;
constexpr int kMostBreaks = 8;  // in a row that are no lost connections, with nothing new heard in between
constexpr absl::Duration kNameTimeout = absl::Seconds(2);

// Why a stream has ended is told by its OnClosed, which follows and decides what becomes of the link; a send that comes
// before it may know no more than that it has. ResourceExhausted: the message itself cannot be sent.
absl::Status OfEndedStream(const absl::Status& sent) {
  return sent.ok() || absl::IsResourceExhausted(sent) ? sent : absl::UnavailableError(std::string(sent.message()));
}

}  // namespace

// Acknowledgements, and answers to what was asked for with frames.
class ShardLink::PushSink final : public transport::StreamSink {
 public:
  PushSink(ShardLink* link, Connection* connection) : link_(link), connection_(connection) {}
  void OnMessage(transport::Message message) override {
    v1::PushAck ack;
    if (over_) return;
    absl::StatusOr<std::optional<wire::Chunk>> chunk = ReadChunk(message.frame);
    if (!ack.ParseFromString(message.control))
      chunk = absl::DataLossError("an acknowledgement on the push stream cannot be parsed");
    // What follows would lack this chunk.
    over_ = !chunk.ok();
    if (over_) return link_->Broken(connection_, chunk.status());
    const bool acknowledges = ack.outcome() != v1::PUSH_OUTCOME_UNSPECIFIED;
    link_->NoteHeard(ack.round(), ack.bucket(), acknowledges ? -1 : ack.kind());
    std::optional<PullAnswer> answer;
    if (ack.kind() != v1::PULL_UNSPECIFIED)
      answer = link_->Received(answers_.Add(ack, ack.round() + 1, *std::move(chunk)), message);
    if (!acknowledges && !answer) return;
    link_->Deliver([&](LinkEvents* events) {
      if (acknowledges) events->OnAck(link_->options_.shard, ack);
      if (answer) events->OnAnswer(link_->options_.shard, *std::move(answer));
    });
  }
  void OnRoom() override { link_->PumpFrames(); }
  void OnClosed(absl::Status status) override {
    link_->Broken(connection_, status.ok() ? absl::UnavailableError("the server ended the push stream") : status);
  }

 private:
  ShardLink* const link_;
  Connection* const connection_;
  Answers answers_;
  bool over_ = false;
};

// Collects chunks of the pull stream into answers.
class ShardLink::PullSink final : public transport::StreamSink {
 public:
  PullSink(ShardLink* link, Connection* connection) : link_(link), connection_(connection) {}
  void OnMessage(transport::Message message) override {
    v1::PullMessage pull;
    if (over_) return;
    absl::StatusOr<std::optional<wire::Chunk>> chunk = ReadChunk(message.frame);
    if (!pull.ParseFromString(message.control))
      chunk = absl::DataLossError("a message on the pull stream cannot be parsed");
    over_ = !chunk.ok();
    if (over_) return link_->Broken(connection_, chunk.status());
    link_->NoteHeard(pull.version(), pull.bucket(), pull.kind());
    std::optional<PullAnswer> answer = link_->Received(answers_.Add(pull, pull.version(), *std::move(chunk)), message);
    if (!answer) return;
    link_->Deliver([&](LinkEvents* events) { events->OnAnswer(link_->options_.shard, *std::move(answer)); });
  }
  void OnClosed(absl::Status status) override {
    link_->Broken(connection_, status.ok() ? absl::UnavailableError("the server ended the pull stream") : status);
  }

 private:
  ShardLink* const link_;
  Connection* const connection_;
  Answers answers_;
  bool over_ = false;
};

// Destroyed in reverse: streams before their sinks.
struct ShardLink::Connection {
  explicit Connection(ShardLink* link) : pushes(link, this), pulls(link, this) {}
  PushSink pushes;
  PullSink pulls;
  std::unique_ptr<transport::Stream> push;
  std::unique_ptr<transport::Stream> pull;
  std::optional<FrameQueue> frames;  // of `push`, from when it is open
  // Both streams are there, unless it was broken from the start.
  void Cancel() {
    if (push != nullptr) push->Cancel();
    if (pull != nullptr) pull->Cancel();
  }
  // Guarded by the link's mu_.
  bool broken = false;
  absl::Status why;  // annotated
  int users = 0;
};

ShardLink::Use::Use(ShardLink* link, bool broken_too) : link_(link) {
  absl::MutexLock lock(&link->mu_);
  if (link->connection_ == nullptr || (link->connection_->broken && !broken_too)) return;
  connection_ = link->connection_.get();
  ++connection_->users;
}

ShardLink::Use::~Use() {
  if (connection_ == nullptr) return;
  absl::MutexLock lock(&link_->mu_);
  --connection_->users;
}

ShardLink::ShardLink(LinkOptions options)
    : options_(std::move(options)),
      servers_(options_.address, options_.rpc_timeout_ms),
      leave_timeout_ms_(options_.rpc_timeout_ms),
      may_initialize_(options_.shard == 0) {}

ShardLink::~ShardLink() { Close(false).IgnoreError(); }

absl::Status ShardLink::Annotate(const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("shard ", options_.shard, " at ", options_.address, ": ",
                                                  std::string(status.message())));
}

void ShardLink::Deliver(absl::FunctionRef<void(LinkEvents*)> call) {
  LinkEvents* events = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (events_ == nullptr || closing_) return;
    events = events_;
    ++delivering_;
  }
  call(events);
  absl::MutexLock lock(&mu_);
  --delivering_;
  delivered_.SignalAll();
}

std::optional<PullAnswer> ShardLink::Received(std::optional<PullAnswer> answer, const transport::Message& message) {
  pulled_bytes_.fetch_add(TotalSize(message.frame), std::memory_order_relaxed);
  if (answer) answer->status = Annotate(answer->status);
  return answer;
}

void ShardLink::SetEvents(LinkEvents* events) {
  absl::Status lost;
  {
    absl::MutexLock lock(&mu_);
    while (delivering_ > 0) delivered_.Wait(&mu_);
    events_ = events;
    lost = lost_status_;
  }
  if (events != nullptr && !lost.ok()) events->OnLost(options_.shard, lost);
}

absl::StatusOr<v1::JoinReply> ShardLink::Join(const v1::JoinRequest& request) {
  GW_RETURN_IF_ERROR(Annotate(servers_.Dial()));
  {
    absl::MutexLock lock(&mu_);
    join_ = request;
    join_.clear_resume();
    join_.clear_resume_round();
    join_.clear_known_epoch();
    join_.clear_known_lineage();
    join_.clear_known_instance();
  }
  return JoinWithin(request, options_.connect_timeout_ms);
}

absl::StatusOr<std::string> ShardLink::AskToJoin(const std::string& request, absl::Time deadline) {
  GW_RETURN_IF_ERROR(servers_.Choose(server_epoch(), deadline));
  const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
  return channel()->Call("gradwire.v1.Worker/Join", request, std::clamp<int64_t>(left_ms, 1, options_.rpc_timeout_ms));
}

bool ShardLink::replaced() {
  absl::MutexLock lock(&mu_);
  return absl::IsFailedPrecondition(lost_status_);
}

ServerEpoch ShardLink::server_epoch() {
  absl::MutexLock lock(&mu_);
  return server_epoch_;
}

uint64_t ShardLink::job_instance() {
  absl::MutexLock lock(&mu_);
  return instance_;
}

absl::StatusOr<uint64_t> ShardLink::CatchUp(uint64_t start_version) {
  // What it has seen, in case that the shard was recovered without it: this may come before the streams are mended.
  std::optional<ResumePoint> point;
  Deliver([&](LinkEvents* events) { point = events->ResumeAt(options_.shard); });
  v1::JoinRequest request;
  {
    absl::MutexLock lock(&mu_);
    if (lost_) return lost_status_;
    request = join_;
    request.set_known_epoch(server_epoch_.epoch);
    request.set_known_lineage(server_epoch_.lineage);
    request.set_known_instance(instance_);
  }
  request.set_catch_up(true);
  request.set_start_version(start_version);
  if (point && !point->anew) {  // else it has seen nothing yet
    request.set_resume_round(point->round);
    request.mutable_resume_seen()->Assign(point->seen.begin(), point->seen.end());
  }
  GW_ASSIGN_OR_RETURN(const v1::JoinReply reply, JoinWithin(request, options_.connect_timeout_ms));
  return reply.start_version();
}

absl::StatusOr<v1::JoinReply> ShardLink::JoinWithin(v1::JoinRequest request, int64_t timeout_ms) {
  {
    absl::MutexLock lock(&mu_);
    if (closing_) return absl::CancelledError("the session is closing");
    request.set_may_initialize(may_initialize_);
  }
  const absl::Time began = absl::Now();
  const absl::Time deadline = began + absl::Milliseconds(timeout_ms);
  std::minstd_rand random(static_cast<uint32_t>(options_.identity.incarnation() ^ options_.shard));
  int64_t backoff_ms = kFirstBackoffMs;
  for (int attempt = 1;; ++attempt) {
    absl::StatusOr<std::string> answer = AskToJoin(request.SerializeAsString(), deadline);
    absl::StatusOr<v1::JoinReply> reply = answer.ok() ? TakeJoined(*answer, &request) : answer.status();
    if (reply.ok()) return reply;
    const bool taken = absl::IsAlreadyExists(reply.status());
    const bool doubt = MayBeDamage(reply.status()) && attempt <= kMostDoubts;
    if (!Retryable(reply.status()) && !taken && !doubt) return Annotate(reply.status());
    const int64_t wait_ms = std::uniform_int_distribution<int64_t>(backoff_ms / 2, backoff_ms)(random);
    const absl::Time end = taken ? std::min(deadline, began + kNameTimeout) : deadline;
    if (absl::Now() + absl::Milliseconds(wait_ms) >= end) {
      if (taken) return Annotate(reply.status());
      return Annotate(absl::Status(reply.status().code(),
                                   absl::StrCat(std::string(reply.status().message()), " (", attempt, " attempts in ",
                                                timeout_ms, " ms; is the server running, and is the address right?)")));
    }
    absl::MutexLock lock(&mu_);
    if (!closing_) stop_.WaitWithTimeout(&mu_, absl::Milliseconds(wait_ms));
    if (closing_) return absl::CancelledError("the session is closing");
    backoff_ms = std::min(backoff_ms * 2, kLastBackoffMs);
  }
}

absl::StatusOr<v1::JoinReply> ShardLink::TakeJoined(const std::string& answer, v1::JoinRequest* request) {
  v1::JoinReply reply;
  if (!reply.ParseFromString(answer)) return absl::DataLossError("the reply to Join cannot be parsed");
  absl::MutexLock lock(&mu_);
  // Epochs of servers that keep jobs grow. Another call may have joined the next server while this one was answered.
  const ServerEpoch its{reply.server_epoch(), reply.lineage()};
  if (options_.durable && its.Before(server_epoch_)) {
    if (request->known_epoch() != 0) {
      request->set_known_epoch(server_epoch_.epoch);
      request->set_known_lineage(server_epoch_.lineage);
    }
    return absl::UnavailableError(absl::StrCat("a server of epoch ", its.epoch, " answered, which one of epoch ",
                                               server_epoch_.epoch, " has replaced"));
  }
  joined_ = true;
  members_ = reply.members();
  gone_ = reply.gone();
  server_epoch_ = its;
  instance_ = reply.instance();
  return reply;
}

absl::Status ShardLink::Start(int64_t lease_ms, LinkEvents* events) {
  leave_timeout_ms_ = std::min(options_.rpc_timeout_ms, lease_ms);
  SetEvents(events);
  const absl::Status opened = OpenStreams();
  if (!opened.ok()) {
    if (!Mendable(opened)) return opened;
    absl::MutexLock lock(&mu_);
    connection_ = std::make_unique<Connection>(this);
    connection_->broken = true;
    connection_->why = opened;
  }
  heartbeat_ = std::thread([this, lease_ms] { HeartbeatLoop(lease_ms); });
  return absl::OkStatus();
}

absl::Status ShardLink::OpenStreams() {
  auto connection = std::make_unique<Connection>(this);
  auto push = channel()->Open("gradwire.v1.Worker/Push", &connection->pushes);
  if (!push.ok()) return Annotate(push.status());
  connection->push = *std::move(push);
  connection->frames.emplace(connection->push.get(), &frames_);
  auto pull = channel()->Open("gradwire.v1.Worker/Pull", &connection->pulls);
  if (!pull.ok()) return Annotate(pull.status());
  connection->pull = *std::move(pull);
  v1::PushMessage push_open;
  *push_open.mutable_open() = options_.identity;
  v1::PullRequest pull_open;
  *pull_open.mutable_open() = options_.identity;
  absl::Status sent = connection->push->Send({push_open.SerializeAsString(), {}});
  if (sent.ok()) sent = connection->pull->Send({pull_open.SerializeAsString(), {}});
  // Why they have ended at once is told by OnClosed; they are opened anew.
  if (!sent.ok()) return Annotate(absl::UnavailableError(std::string(sent.message())));
  absl::MutexLock lock(&mu_);
  if (closing_) return absl::CancelledError("the session is closing");
  connection_ = std::move(connection);
  return absl::OkStatus();
}

void ShardLink::CloseStreams() {
  EndStreams();
  std::unique_ptr<Connection> old;  // destroyed without the lock: that waits for its sinks, which take it
  absl::MutexLock lock(&mu_);
  const auto unused = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return connection_ == nullptr || connection_->users == 0;
  };
  mu_.Await(absl::Condition(&unused));
  old = std::move(connection_);
}

void ShardLink::AllowInitialize(bool may) {
  absl::MutexLock lock(&mu_);
  if (options_.shard == 0 || may_initialize_ == may) return;
  may_initialize_ = may;
  beat_now_ = true;
  stop_.SignalAll();
}

absl::Status ShardLink::SendFrame(OutgoingFrame frame) {
  const Use use(this);
  if (!use) return WhyBroken();
  return Annotate(OfEndedStream(use->frames->Add(std::move(frame))));
}

void ShardLink::PumpFrames() {
  {
    const Use use(this);
    if (!use) return;
    const absl::Status sent = use->frames->Pump();
    // Why a stream has ended is told by its OnClosed; a message that cannot be sent ends none.
    if (absl::IsResourceExhausted(sent)) Broken(use.get(), sent);
  }
  Deliver([&](LinkEvents* events) { events->OnRoom(options_.shard); });
}

void ShardLink::AwaitRoom() {
  absl::MutexLock lock(&mu_);
  const auto room = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return HasRoom() || closing_ || lost_ || connection_ == nullptr || connection_->broken;
  };
  mu_.Await(absl::Condition(&room));
}

absl::Status ShardLink::RequestPull(v1::PullKind kind, uint64_t version, uint32_t bucket_begin, uint32_t bucket_end) {
  v1::PullRequest request;
  request.set_kind(kind);
  request.set_version(version);
  request.set_bucket_begin(bucket_begin);
  request.set_bucket_end(bucket_end);
  const Use use(this);
  if (!use) return WhyBroken();
  return Annotate(OfEndedStream(use->pull->Send({request.SerializeAsString(), {}})));
}

bool FrameLink::Mends(const absl::Status& status) { return Mendable(status) || absl::IsCancelled(status); }

absl::Status ShardLink::WhyBroken() {
  absl::MutexLock lock(&mu_);
  if (lost_) return lost_status_;
  if (connection_ != nullptr && connection_->broken) {
    // It is being mended, or OnLost follows.
    return Mendable(connection_->why) ? connection_->why : absl::UnavailableError(connection_->why.message());
  }
  return Annotate(absl::UnavailableError("there are no streams"));
}

void ShardLink::Broken(Connection* connection, const absl::Status& reason) {
  // A stream that was cut off says "cancelled" on some transports; to the worker it is a lost shard.
  absl::Status status =
      Annotate(absl::IsCancelled(reason) ? absl::UnavailableError(std::string(reason.message())) : reason);
  {
    absl::MutexLock lock(&mu_);
    if (connection->broken || closing_ || lost_) return;
    connection->broken = true;
    // Anything else may be a message that was damaged on its way, here or there: it is sent again. Not for ever: what
    // is refused each time was not damaged on its way.
    const bool lost = !Mendable(status) && ++breaks_ > kMostBreaks;
    if (lost) {
      status = absl::Status(status.code(), absl::StrCat(std::string(status.message()), " (", breaks_,
                                                        " times in a row, each on a new connection)"));
    }
    connection->why = status;
    // A connection that is still being opened has no other thread yet that would see it.
    if (!lost) return stop_.SignalAll();
  }
  Lost(status);
}

void ShardLink::NoteHeard(uint64_t version, uint32_t bucket, int kind) {
  absl::MutexLock lock(&mu_);
  if (version < heard_version_) return;
  if (version > heard_version_) heard_.clear();
  heard_version_ = version;
  // What comes again after each break is no progress.
  if (heard_.emplace(bucket, kind).second) breaks_ = 0;
}

void ShardLink::BreakStreams(const absl::Status& status) {
  const Use use(this);
  if (use) Broken(use.get(), status);
}

void ShardLink::Notice(const std::string& text) const {
  if (options_.notice) options_.notice(text);
}

void ShardLink::NoteMembers(uint32_t members, uint64_t gone, const std::string& last_gone) {
  members_ = members;
  const uint64_t before = gone_.exchange(gone);
  if (options_.shard != 0 || gone <= before) return;
  const std::string others =
      gone - before == 1 ? "" : absl::StrFormat(" (since the last report %d others, too)", gone - before - 1);
  Notice(
      absl::StrFormat("%s%s; training goes on with %d worker%s", last_gone, others, members, members == 1 ? "" : "s"));
}

void ShardLink::Lost(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    if (closing_ || lost_) return;
    lost_ = true;
    lost_status_ = reason;
    stop_.SignalAll();
  }
  Deliver([&](LinkEvents* events) { events->OnLost(options_.shard, reason); });
}

absl::StatusOr<std::string> ShardLink::CallOperator(std::string_view method, std::string request) {
  absl::StatusOr<std::string> reply =
      channel()->Call("gradwire.v1.Operator/" + std::string(method), std::move(request), options_.rpc_timeout_ms);
  if (reply.ok()) return reply;
  return Annotate(reply.status());
}

void ShardLink::Cancel() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
    stop_.SignalAll();
  }
  EndStreams();
}

void ShardLink::EndStreams() {
  const Use use(this, /*broken_too=*/true);
  if (use) use->Cancel();
}

void ShardLink::HeartbeatLoop(int64_t lease_ms) {
  v1::HeartbeatRequest request;
  *request.mutable_identity() = options_.identity;
  const int64_t period_ms = std::max<int64_t>(lease_ms / 3, 10);
  absl::Time last_success = absl::Now();
  for (;;) {
    absl::Status why;  // the streams broke
    {
      absl::MutexLock lock(&mu_);
      if (!closing_ && !lost_ && !beat_now_ && !connection_->broken)
        stop_.WaitWithTimeout(&mu_, absl::Milliseconds(period_ms));
      if (closing_ || lost_) return;
      if (connection_->broken) why = connection_->why;
      beat_now_ = false;
      request.set_may_initialize(may_initialize_);
    }
    bool failed = false;
    Deliver([&failed](LinkEvents* events) { failed = events->HasFailed(); });
    if (failed) return EndStreams();  // the lease ends soon, and whoever has this worker's name may take its place
    if (!why.ok()) {
      if (!Mend(why)) return;
      last_success = absl::Now();
      continue;
    }
    request.set_sanitized_elements(SanitizedElements());
    auto reply = channel()->Call("gradwire.v1.Worker/Heartbeat", request.SerializeAsString(),
                                 std::min(options_.rpc_timeout_ms, period_ms));
    if (reply.ok()) {
      last_success = absl::Now();
      v1::HeartbeatReply parsed;
      if (parsed.ParseFromString(*reply)) {
        NoteMembers(parsed.members(), parsed.gone(), parsed.last_gone());
        if (parsed.must_initialize()) Deliver([&](LinkEvents* events) { events->OnMustInitialize(options_.shard); });
      }
    } else if (!Retryable(reply.status()) && !MayBeDamage(reply.status())) {
      if (!Mendable(reply.status())) return Lost(Annotate(reply.status()));
      BreakStreams(reply.status());
    } else if (absl::Now() - last_success > absl::Milliseconds(lease_ms)) {
      const absl::Status silent = absl::UnavailableError(absl::StrCat(
          "no answer to heartbeats for a whole lease of ", lease_ms, " ms: ", std::string(reply.status().message())));
      BreakStreams(silent);
    }
  }
}

absl::Status ShardLink::Close(bool leave) {
  bool tell = false;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return absl::OkStatus();
    closed_ = true;
    tell = leave && joined_ && !lost_;
    closing_ = true;
    stop_.SignalAll();
  }
  if (heartbeat_.joinable()) heartbeat_.join();
  absl::Status status;
  if (tell) {
    v1::LeaveRequest request;
    *request.mutable_identity() = options_.identity;
    request.set_sanitized_elements(SanitizedElements());
    status =
        Annotate(channel()->Call("gradwire.v1.Worker/Leave", request.SerializeAsString(), leave_timeout_ms_).status());
    if (absl::IsNotFound(status)) status = absl::OkStatus();  // its lease had ended: nobody waits for it
  }
  CloseStreams();
  servers_.Close();
  SetEvents(nullptr);
  return status;
}

}  // namespace gradwire::client
