// What the rounds of a worker ask of its connection to one shard. ShardLink; a simulator has its own.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::client {

// The chunks of one frame, and which kinds of the version that its round makes are asked for with it.
struct OutgoingFrame {
  std::vector<Bytes> chunks = {};
  std::vector<v1::PullKind> pull = {};
  // Of frames that wait for the network, those of the oldest round go first, and of a round those of the lowest turn.
  uint64_t round = 0;
  uint32_t turn = 0;
};

// Thread-safe.
class FrameLink {
 public:
  virtual ~FrameLink() = default;
  // Queues a frame, and returns at once: a slow shard holds nobody. Unavailable while there are no streams: where
  // breaks are mended, OnResumed or OnLost follows.
  virtual absl::Status SendFrame(OutgoingFrame frame) = 0;
  // False: so much waits for the network that no further frame should be encoded for this shard now. LinkEvents::OnRoom
  // follows. May be called under any lock.
  virtual bool HasRoom() const { return true; }
  virtual absl::Status RequestPull(v1::PullKind kind, uint64_t version, uint32_t bucket_begin, uint32_t bucket_end) = 0;
  // The worker fell behind: joins to start anew, not before `start_version`. The start version that the shard names.
  virtual absl::StatusOr<uint64_t> CatchUp(uint64_t start_version) = 0;
  // As transport::Channel's: receives on this thread, where that is possible; true: call again.
  virtual bool Poll() { return false; }
  virtual void StopPolling() {}
  // `status` of a send is no loss yet: the streams are being replaced, and the receiver of events will be told.
  static bool Mends(const absl::Status& status);
  // Prefixes a message with who this is.
  virtual absl::Status Annotate(const absl::Status& status) const = 0;
};

}  // namespace gradwire::client
