// What the rounds of a worker ask of its connection to one shard. ShardLink; a simulator has its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::client {

// Thread-safe.
class FrameLink {
 public:
  virtual ~FrameLink() = default;
  // Sends the chunks of one frame, and asks for the kinds `pull` of the version that its round makes. Blocks while the
  // transport's window is full. Unavailable while there are no streams: where breaks are mended, OnResumed or OnLost
  // follows.
  virtual absl::Status SendFrame(const std::vector<Bytes>& chunks, std::span<const v1::PullKind> pull = {}) = 0;
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
