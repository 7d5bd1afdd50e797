// A stream that keeps what was sent and how it ended.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/transport/transport.h"

namespace gradwire::testing_support {

class RecordingStream final : public transport::Stream {
 public:
  absl::Status Send(transport::Message message) override {
    message.Complete();
    sent.push_back(std::move(message));
    return absl::OkStatus();
  }
  void Finish(absl::Status status) override { finished = std::move(status); }
  void Cancel() override {}
  std::vector<transport::Message> sent;
  std::optional<absl::Status> finished;
};

}  // namespace gradwire::testing_support
