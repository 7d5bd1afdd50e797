// A worker's connection to one shard: two streams and what of an answer has come. Of WorkerSession.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/wire/frame.h"
#include "tests/sim/worker_node.h"

namespace gradwire::sim {

inline constexpr TimeNs kCallTimeout = kSecond;

// As ShardLink.
inline bool Retryable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}
inline bool Mendable(const absl::Status& status) { return Retryable(status) || absl::IsNotFound(status); }

inline Target TargetOf(ServerProcess* process) { return process == nullptr ? Target() : process->target(); }

// The worker's end of one stream.
class LinkEnd final : public ClientEnd {
 public:
  LinkEnd(std::weak_ptr<WorkerSession> session, uint32_t shard, uint64_t connection, bool push)
      : session_(std::move(session)), shard_(shard), connection_(connection), push_(push) {}
  void OnMessage(const transport::Message& message) override;
  void OnClosed(const absl::Status& status) override;

 private:
  template <typename Control>
  void Take(WorkerSession& session, const Control& control, uint64_t version, const transport::Message& message);

  const std::weak_ptr<WorkerSession> session_;
  const uint32_t shard_;
  const uint64_t connection_;
  const bool push_;
  std::map<std::pair<uint32_t, int>, std::vector<wire::Chunk>> open_;  // by bucket and kind
};

struct WorkerSession::Link {
  bool joined = false;
  bool connected = false;
  bool mending = false;
  bool silent_heartbeat = false;
  uint64_t connection = 0;  // grows with each pair of streams
  uint64_t epoch = 0;
  uint64_t lineage = 0;
  TimeNs last_beat = 0;
  std::vector<std::shared_ptr<LinkEnd>> ends;  // also of old streams: what is on its way points to them
  std::shared_ptr<SimStream> push;
  std::shared_ptr<SimStream> pull;
  // Starting.
  uint64_t start = 0;
  bool must_initialize = false;
  bool uploading = false;
  bool pulling = false;
  bool refused = false;
  uint32_t uploaded = 0;
  uint32_t answered = 0;
  bool trained = false;  // an answer is of a later version than the one that was asked for
  std::vector<std::vector<wire::Chunk>> answers;

  // Both streams break; who hears of it, and when.
  void Drop(TimeNs client_delay, TimeNs server_delay) {
    for (const auto& stream : {push, pull})
      if (stream != nullptr) stream->Break(client_delay, server_delay);
  }
};

// What AsyncExchange sends on.
class WorkerSession::AsyncLink final : public client::FrameLink {
 public:
  AsyncLink(WorkerSession* session, uint32_t shard) : session_(session), shard_(shard) {}
  absl::Status SendFrame(client::OutgoingFrame frame) override;
  absl::Status RequestPull(v1::PullKind kind, uint64_t version, uint32_t bucket_begin, uint32_t bucket_end) override;
  absl::StatusOr<uint64_t> CatchUp(uint64_t) override { return absl::UnimplementedError("nobody is behind"); }
  absl::Status Annotate(const absl::Status& status) const override { return status; }

 private:
  WorkerSession* const session_;
  const uint32_t shard_;
};

}  // namespace gradwire::sim
