// The server's end of one Pull stream: requests in, update frames and parameters out.
#pragma once

#include <memory>

#include "common/transport/transport.h"
#include "server/desk/outbox.h"
#include "server/job/job_registry.h"

namespace gradwire {

// Owned by the transport until OnClosed. Called by one thread at a time.
class PullSink final : public transport::StreamSink {
 public:
  PullSink(JobRegistry* registry, std::shared_ptr<Outbox> out) : registry_(registry), out_(std::move(out)) {}

  void OnMessage(transport::Message message) override;
  void OnClosed(absl::Status status) override;

 private:
  absl::Status Handle(const transport::Message& message);

  JobRegistry* const registry_;
  const std::shared_ptr<Outbox> out_;
  std::shared_ptr<JobShard> job_;  // null until the stream was opened
  MemberId member_ = 0;
  bool over_ = false;
};

}  // namespace gradwire
