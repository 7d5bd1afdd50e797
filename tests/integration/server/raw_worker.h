// A worker made of nothing but the transport and the protocol: for tests that send a server what no client would.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/transport.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/worker.pb.h"
#include "tests/unit/server/frame_maker.h"

namespace gradwire::testing_support {

// Collects what one stream delivers.
class Inbox final : public transport::StreamSink {
 public:
  void OnMessage(transport::Message message) override;
  void OnClosed(absl::Status status) override;
  // The next message, or how the stream ended, or DeadlineExceeded after 10 s.
  absl::StatusOr<transport::Message> Next();
  // How the stream ended; DeadlineExceeded after 10 s.
  absl::Status Closed();
  // Forgets everything, for the next stream.
  void Clear();

 private:
  absl::Mutex mu_;
  std::deque<transport::Message> messages_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mu_);
};

struct Answer {
  v1::PullMessage control;
  std::vector<Bytes> chunks;
};

// Not thread-safe. One shard.
class RawWorker {
 public:
  RawWorker(const std::string& address, const v1::JobSpec& spec, const std::string& name, uint64_t incarnation);
  ~RawWorker();

  v1::JoinRequest JoinRequest() const;
  absl::StatusOr<v1::JoinReply> Join() { return Join(JoinRequest()); }
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request);
  // Goes on with `round` over new connections to `address`; `known_epoch` is of the lineage that it was told last.
  absl::StatusOr<v1::JoinReply> Resume(const std::string& address, uint64_t round, uint64_t known_epoch = 0);
  absl::Status Heartbeat();
  absl::Status Leave();
  // Opens both streams as this worker.
  absl::Status Open();

  absl::Status Send(const std::vector<Bytes>& chunks);
  absl::StatusOr<v1::PushAck> NextAck();
  // Sends a frame and waits for its acknowledgement.
  absl::StatusOr<v1::PushAck> Push(const std::vector<Bytes>& chunks);
  absl::Status RequestPull(v1::PullKind kind, uint64_t version);
  absl::StatusOr<Answer> NextAnswer();

  // Joins, opens, and if chosen uploads parameters that are all `value`.
  absl::Status Start(float value);
  // Pushes `value` for every bucket; the acknowledgements must say INCLUDED.
  absl::Status PushAll(uint64_t round, float value);
  // The same with frames that replace the parameters by `value`.
  absl::Status ReplaceAll(uint64_t round, float value);
  // Waits for the update that makes `version` of every bucket and follows it; returns the contributors of bucket 0.
  // `requested`: RequestPull was called for it before.
  absl::StatusOr<uint32_t> FollowUpdate(uint64_t version, bool requested = false);

  FrameMaker& frames() { return frames_; }
  Inbox& push_inbox() { return push_inbox_; }
  Inbox& pull_inbox() { return pull_inbox_; }
  transport::Channel& channel() { return *channel_; }
  v1::WorkerIdentity& identity() { return identity_; }
  void set_lineage(uint64_t lineage) { lineage_ = lineage; }

 private:
  absl::Status PushIncluded(uint64_t round, const std::vector<Bytes>& frame);

  const v1::JobSpec spec_;
  FrameMaker frames_;
  v1::WorkerIdentity identity_;
  uint64_t lineage_ = 0;
  Inbox push_inbox_;
  Inbox pull_inbox_;
  std::shared_ptr<transport::Channel> channel_;
  std::unique_ptr<transport::Stream> push_;
  std::unique_ptr<transport::Stream> pull_;
};

// DescribeJob of a server.
absl::StatusOr<v1::JobStatus> DescribeJob(transport::Channel& channel, const std::string& job, bool digest);

}  // namespace gradwire::testing_support
