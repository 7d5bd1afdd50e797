// Who waits for what of a bucket, and the answer on its way to it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "common/wire/frame.h"
#include "gradwire/v1/worker.pb.h"
#include "server/desk/outbox.h"
#include "server/rounds/membership.h"

namespace gradwire {

// The frame of one answer; shared by every puller of it.
using SharedFrame = std::shared_ptr<const wire::FrameToSend>;

// A pull that waits for its version.
struct Waiter {
  MemberId member = 0;
  std::shared_ptr<Outbox> out;
  v1::PullKind kind = v1::PULL_UNSPECIFIED;
  uint64_t version = 0;  // which versions will do: see Answers
  // The round of the frame that it was asked for with: answered as PushAck, else as PullMessage.
  std::optional<uint64_t> pushed = {};
  // Parameters of a version that is there and may not be seen yet: the bucket may go on before it may.
  SharedFrame prepared = nullptr;
  uint64_t prepared_version = 0;
};

// An answer that is ready to be sent, once no lock is held.
struct Delivery {
  Waiter to;
  uint32_t bucket = 0;
  absl::Status status;  // not OK: sent instead of a frame
  SharedFrame frame;
  // Else acknowledges the frame that it was asked for with.
  v1::PushOutcome outcome = v1::PUSH_OUTCOME_UNSPECIFIED;
  uint64_t open_round = 0;  // as in PushAck
  uint64_t made = 0;        // the same
  bool abstained = false;   // the same
};

}  // namespace gradwire
