// The connection of one worker to one shard: the Join call with its retries, the push and pull streams, the heartbeat,
// and new streams when the old ones broke, on the server that serves the shard then. Turns what arrives into events;
// knows nothing of rounds.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/internal/frame_link.h"
#include "client/cpp/internal/frame_queue.h"
#include "client/cpp/internal/server_choice.h"
#include "common/base/bytes.h"
#include "common/transport/transport.h"
#include "common/wire/frame.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::client {

// All chunks of one bucket's answer, on either stream, or why there is none.
struct PullAnswer {
  v1::PullKind kind = v1::PULL_UNSPECIFIED;
  uint32_t bucket = 0;
  uint64_t version = 0;
  std::vector<wire::Chunk> chunks;
  absl::Status status;
};

// Where a worker stands when it comes back to a shard: JoinRequest.resume_round, resume_seen and resume_versions.
struct ResumePoint {
  uint64_t round = 0;
  std::vector<uint32_t> seen = {};
  std::vector<uint64_t> versions = {};
  // It has not begun: it joins as at first, to start with version `round` or a later one.
  bool anew = false;
};

// Called from threads of the transport and of the heartbeat, never under a lock of the link. Must return quickly.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  virtual void OnAck(uint32_t shard, const v1::PushAck& ack) = 0;
  virtual void OnAnswer(uint32_t shard, PullAnswer answer) = 0;
  // Frames have left since HasRoom may have said that there is none.
  virtual void OnRoom(uint32_t shard) {}
  // The shard asks this worker for the initial parameters (their uploader was lost).
  virtual void OnMustInitialize(uint32_t shard) = 0;
  // The streams broke, or the membership ended: where the worker wants to go on. Nothing: it does not, the shard is
  // lost.
  virtual std::optional<ResumePoint> ResumeAt(uint32_t shard) { return std::nullopt; }
  // It will not go on, for any reason: nobody is to wait for this worker on this shard either. Asked before each
  // heartbeat.
  virtual bool HasFailed() { return false; }
  // There are new streams. What was sent on the old ones and not answered may have arrived or not. `behind`: the round
  // is over there, and nobody waits for this worker until it has caught up.
  virtual void OnResumed(uint32_t shard, bool behind) {}
  // The same where ResumeAt said `anew`; what the shard replied. `behind`: with another version than asked for.
  virtual void OnJoinedAnew(uint32_t shard, const v1::JoinReply& reply, bool behind) { OnResumed(shard, behind); }
  // The connection or the membership is lost; reported once.
  virtual void OnLost(uint32_t shard, const absl::Status& status) = 0;
};

struct LinkOptions {
  std::string address;  // or several, "grpc://a:7070|grpc://b:7070": a shard server and its standbys
  uint32_t shard = 0;
  v1::WorkerIdentity identity;
  int64_t connect_timeout_ms = 0;  // both at least 1
  int64_t rpc_timeout_ms = 0;
  int64_t reconnect_timeout_ms = 0;  // after a break, until the shard has taken the worker back
  bool durable = false;              // a shard that was restarted knows the job
  // What heartbeats and Leave tell about the worker's gradients; may be empty. Called from any thread until Close.
  std::function<uint64_t()> sanitized_elements;
  // SessionOptions.notice; may be empty.
  std::function<void(const std::string&)> notice;
};

// Thread-safe. Lives until Close; owns its streams and its heartbeat thread, which also mends broken streams.
class ShardLink final : public FrameLink {
 public:
  explicit ShardLink(LinkOptions options);
  ~ShardLink() override;
  ShardLink(const ShardLink&) = delete;
  ShardLink& operator=(const ShardLink&) = delete;

  // Joins, at the server that serves with the largest epoch where there are several addresses; Unavailable and
  // DeadlineExceeded are tried again, with jittered back-off, until connect_timeout_ms is over, and AlreadyExists for
  // two seconds of it: the connection of a former worker of this name is about to end. Any other error of the shard is
  // final. Messages name shard and address.
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request);
  // As Join does; once Start has returned.
  absl::StatusOr<uint64_t> CatchUp(uint64_t start_version) override;
  // Opens the streams and starts the heartbeat; streams that cannot be opened are mended as those that break. `events`
  // must live until Close has returned or SetEvents replaced it.
  absl::Status Start(int64_t lease_ms, LinkEvents* events);
  // Returns when the old receiver will not be called again. The new one is told if the link was lost before.
  void SetEvents(LinkEvents* events);

  // Shard 0 chose this worker to send the initial parameters: from now on every join and heartbeat says that it may
  // (JoinRequest.may_initialize), and the shard is told at once. False: it no longer may. Shard 0 is told so always.
  void AllowInitialize(bool may);

  absl::Status SendFrame(OutgoingFrame frame) override;
  bool HasRoom() const override { return frames_.unsent < kMostUnsentBytes; }
  // Blocks until HasRoom, or until there are no streams: for a caller whose frames nothing else bounds.
  void AwaitRoom();
  absl::Status RequestPull(v1::PullKind kind, uint64_t version, uint32_t bucket_begin, uint32_t bucket_end) override;
  // A call of gradwire.v1.Operator on the server that serves now, within rpc_timeout_ms; once Start has returned, until
  // Close.
  absl::StatusOr<std::string> CallOperator(std::string_view method, std::string request);
  // Once Start has returned.
  bool Poll() override { return channel()->Poll(); }
  void StopPolling() override { channel()->StopPolling(); }
  // Ends the streams at once: a blocked AwaitRoom returns, no more events are delivered. Join and Start return
  // Cancelled. May be called while any of these runs; not together with Close.
  void Cancel();
  // Ends heartbeat and streams; tells the shard if `leave`. Idempotent; not while AwaitRoom runs (see Cancel).
  absl::Status Close(bool leave);

  uint64_t pushed_bytes() const { return frames_.sent.load(std::memory_order_relaxed); }
  uint64_t pulled_bytes() const { return pulled_bytes_.load(std::memory_order_relaxed); }
  // Of the job, as the shard said last.
  uint32_t members() const { return members_.load(std::memory_order_relaxed); }
  // Another incarnation took this worker's place, or another server the shard's; once Start has returned.
  bool replaced();
  // Of the server, as its last reply to a join says.
  ServerEpoch server_epoch();
  // Of the job, as that reply says: JoinReply.instance.
  uint64_t job_instance();
  const std::string& address() const { return options_.address; }
  absl::Status Annotate(const absl::Status& status) const override;

 private:
  // What may wait for the network beside the transport's window, before encoders turn to other shards.
  static constexpr uint64_t kMostUnsentBytes = 8u << 20;

  class PushSink;
  class PullSink;
  struct Connection;
  // Keeps the connection from being replaced.
  class Use {
   public:
    // `broken_too`: also when its streams broke.
    explicit Use(ShardLink* link, bool broken_too = false);
    ~Use();
    Connection* operator->() const { return connection_; }
    Connection* get() const { return connection_; }
    explicit operator bool() const { return connection_ != nullptr; }

   private:
    ShardLink* const link_;
    Connection* connection_ = nullptr;
  };

  transport::Channel* channel() const { return servers_.channel(); }
  // Asks the server that serves now.
  absl::StatusOr<std::string> AskToJoin(const std::string& request, absl::Time deadline);
  absl::StatusOr<v1::JoinReply> JoinWithin(v1::JoinRequest request, int64_t timeout_ms);
  // Unavailable: it is of a server that was replaced meanwhile; `request` now says by which.
  absl::StatusOr<v1::JoinReply> TakeJoined(const std::string& answer, v1::JoinRequest* request);
  v1::JoinRequest RequestToMend(const ResumePoint& point);
  absl::Status OpenStreams();
  void EndStreams();
  void CloseStreams();
  // The streams of `connection` broke. The heartbeat thread mends it, or the link is lost.
  void Broken(Connection* connection, const absl::Status& reason);
  // A message on a stream. `kind` tells its answers apart.
  void NoteHeard(uint64_t version, uint32_t bucket, int kind);
  // The push stream has room.
  void PumpFrames();
  absl::Status WhyBroken();
  void BreakStreams(const absl::Status& status);  // of the current connection
  // On the heartbeat thread; `why`: the streams broke. False: the link is lost or closing.
  bool Mend(const absl::Status& why);
  // It was not started anew: a job in memory goes with its server, and is not to be made again.
  bool IsSameServer();
  void Lost(const absl::Status& reason);  // annotated
  // What is told of a shard that was not got back: what happened, and what to do.
  absl::Status GivenUp(const absl::Status& why, const absl::Status& mended, absl::Duration waited) const;
  void Notice(const std::string& text) const;
  void NoteMembers(uint32_t members, uint64_t gone, const std::string& last_gone);
  void HeartbeatLoop(int64_t lease_ms);
  uint64_t SanitizedElements() const { return options_.sanitized_elements ? options_.sanitized_elements() : 0; }
  // `message` has arrived, the last chunk of `answer` if there is one: counts it, and says whose it is.
  std::optional<PullAnswer> Received(std::optional<PullAnswer> answer, const transport::Message& message);
  // Runs `call` on the current receiver, which stays the receiver meanwhile.
  void Deliver(absl::FunctionRef<void(LinkEvents*)> call);

  const LinkOptions options_;
  ServerChoice servers_;
  std::thread heartbeat_;
  int64_t leave_timeout_ms_;   // not longer than the lease, which ends the membership as well
  FrameQueue::Totals frames_;  // of the queue of the current connection, and of those before
  std::atomic<uint64_t> pulled_bytes_{0};
  std::atomic<uint32_t> members_{0};
  std::atomic<uint64_t> gone_{0};  // HeartbeatReply.gone

  absl::Mutex mu_;
  absl::CondVar delivered_;  // delivering_ fell
  absl::CondVar stop_;       // closing_, lost_ or beat_now_ was set, or the streams broke
  // Replaced by the heartbeat thread, when nobody uses it.
  std::unique_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  LinkEvents* events_ ABSL_GUARDED_BY(mu_) = nullptr;
  int delivering_ ABSL_GUARDED_BY(mu_) = 0;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool lost_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status lost_status_ ABSL_GUARDED_BY(mu_);
  bool may_initialize_ ABSL_GUARDED_BY(mu_);
  bool beat_now_ ABSL_GUARDED_BY(mu_) = false;  // a heartbeat is wanted before its time
  // Breaks in a row that were no lost connection, with nothing new heard since; what was heard of the newest version.
  int breaks_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t heard_version_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_set<std::pair<uint32_t, int>> heard_ ABSL_GUARDED_BY(mu_);
  bool joined_ ABSL_GUARDED_BY(mu_) = false;
  v1::JoinRequest join_ ABSL_GUARDED_BY(mu_);      // the last one that Join was asked for
  ServerEpoch server_epoch_ ABSL_GUARDED_BY(mu_);  // of the last join
  uint64_t instance_ ABSL_GUARDED_BY(mu_) = 0;     // of the job, as that join told it
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::client
