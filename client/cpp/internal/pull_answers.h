// Chunks that arrive on a stream, checked, and put together to the answers of buckets.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/internal/shard_link.h"
#include "common/base/bytes.h"
#include "common/wire/frame.h"

namespace gradwire::client {

// The chunk that a message brought, if any; checked at once, while it is in this core's cache. Errors: DataLoss.
inline absl::StatusOr<std::optional<wire::Chunk>> ReadChunk(std::span<const Bytes> frame) {
  if (frame.empty()) return std::nullopt;
  absl::StatusOr<wire::Chunk> chunk = wire::ParseChunk(wire::Flatten(frame));
  if (chunk.ok()) return *std::move(chunk);
  return absl::DataLossError(
      absl::StrCat("a chunk of an answer was damaged on its way: ", std::string(chunk.status().message())));
}

// Collects the chunks of one stream into answers. Touched by its sink only.
class Answers {
 public:
  // The answer whose last chunk this is. `Control`: PushAck or PullMessage.
  template <typename Control>
  std::optional<PullAnswer> Add(const Control& control, uint64_t version, std::optional<wire::Chunk> chunk) {
    PullAnswer& open = open_[{control.bucket(), control.kind()}];
    if (chunk) open.chunks.push_back(*std::move(chunk));
    if (!control.last() && control.code() == 0) return std::nullopt;
    PullAnswer answer = std::move(open);
    open_.erase({control.bucket(), control.kind()});
    answer.kind = control.kind();
    answer.bucket = control.bucket();
    answer.version = version;
    if (control.code() != 0)
      answer.status = absl::Status(static_cast<absl::StatusCode>(control.code()), std::string(control.message()));
    return answer;
  }

 private:
  std::map<std::pair<uint32_t, int>, PullAnswer> open_;  // by bucket and kind
};

}  // namespace gradwire::client
