// The server's end of one Push stream: chunks in, one acknowledgement per frame out, and the answers asked for with it.
#pragma once

#include <memory>

#include "common/transport/transport.h"
#include "server/desk/outbox.h"
#include "server/job/job_registry.h"

namespace gradwire {

// Owned by the transport until OnClosed. Called by one thread at a time.
class PushSink final : public transport::StreamSink {
 public:
  PushSink(JobRegistry* registry, std::shared_ptr<Outbox> out) : registry_(registry), out_(std::move(out)) {}

  void OnMessage(transport::Message message) override;
  void OnClosed(absl::Status status) override;

 private:
  absl::Status Handle(transport::Message message);
  absl::Status Open(const v1::PushMessage& request);

  JobRegistry* const registry_;
  const std::shared_ptr<Outbox> out_;
  std::shared_ptr<JobShard> job_;  // null until the stream was opened
  PushStream stream_;
  bool over_ = false;
};

}  // namespace gradwire
