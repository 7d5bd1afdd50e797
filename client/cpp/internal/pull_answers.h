// Chunks that arrive on a stream, checked, and put together to the answers of buckets.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/internal/shard_link.h"
#include "common/base/bytes.h"
#include "common/wire/frame.h"

namespace gradwire::client {

// Makes one piece of a chunk, and checks it before anything else is made of it: it is in this core's cache.
inline absl::Status CheckChunk(std::vector<Bytes>* chunk) {
  if (chunk->empty()) return absl::OkStatus();
  if (chunk->size() > 1) *chunk = {wire::Flatten(*chunk)};
  const absl::Status status = wire::ParseReceived(*chunk, nullptr).status();
  if (status.ok()) return status;
  return absl::DataLossError(
      absl::StrCat("a chunk of an answer was damaged on its way: ", std::string(status.message())));
}

// Collects the chunks of one stream into answers. Touched by its sink only.
class Answers {
 public:
  // The answer whose last chunk this is. `Control`: PushAck or PullMessage.
  template <typename Control>
  std::optional<PullAnswer> Add(const Control& control, uint64_t version, const std::vector<Bytes>& frame) {
    PullAnswer& open = open_[{control.bucket(), control.kind()}];
    if (!frame.empty()) open.chunks.push_back(wire::Flatten(frame));
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
