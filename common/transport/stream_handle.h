// What users hold of a stream over a network.
#pragma once

#include <memory>
#include <utility>

#include "common/transport/transport.h"

namespace gradwire::transport {

// `Core` is what a transport makes of a stream. It lives until the stream is over, longer than this where it must.
// `abandon`: destroying it cancels (client); a server's stream ends by Finish alone.
template <typename Core>
class StreamHandle final : public Stream {
 public:
  StreamHandle(std::shared_ptr<Core> core, bool abandon) : core_(std::move(core)), abandon_(abandon) {}
  ~StreamHandle() override {
    if (abandon_) core_->Abandon();
  }
  absl::Status Send(Message message) override { return core_->Send(std::move(message)); }
  absl::StatusOr<bool> TrySend(Message& message) override { return core_->TrySend(message); }
  void Finish(absl::Status status) override { core_->Finish(std::move(status)); }
  void Cancel() override { core_->Cancel(); }

 private:
  const std::shared_ptr<Core> core_;
  const bool abandon_;
};

}  // namespace gradwire::transport
