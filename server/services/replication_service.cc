// See replication_service.h.
#include "server/services/replication_service.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "server/services/unary.h"

namespace gradwire {
namespace {

// The primary's end of one Follow stream. Owned by the transport until OnClosed; called by one thread at a time.
class FollowSink final : public transport::StreamSink {
 public:
  FollowSink(Replication* replication, std::shared_ptr<Outbox> out) : replication_(replication), out_(std::move(out)) {}

  void OnMessage(transport::Message message) override {
    if (over_) return;
    const absl::Status status = CatchBadAlloc("a Follow stream", [&] { return Handle(message); });
    if (status.ok()) return;
    over_ = true;
    if (feed_ != nullptr) return feed_->Drop(status);
    replication_->WarnRefused("standby", status);
    out_->Finish(status);
  }
  void OnClosed(absl::Status status) override {
    if (feed_ != nullptr) {
      feed_->Drop(absl::UnavailableError(absl::StrFormat("its stream ended: %s", status.ToString())));
      feed_->Stop();
    }
    out_->Close();
  }

 private:
  absl::Status Handle(const transport::Message& message) {
    v1::FollowRequest request;
    if (!request.ParseFromString(message.control)) return absl::InvalidArgumentError("not a gradwire.v1.FollowRequest");
    if (feed_ != nullptr) return feed_->OnRequest(request);
    if (!request.has_open())
      return absl::InvalidArgumentError("the first message of a Follow stream must carry `open`");
    GW_ASSIGN_OR_RETURN(const std::shared_ptr<Feed> feed, replication_->Admit(request.open(), out_));
    GW_RETURN_IF_ERROR(feed->Start());
    feed_ = feed;
    return absl::OkStatus();
  }

  Replication* const replication_;
  const std::shared_ptr<Outbox> out_;
  std::shared_ptr<Feed> feed_;  // null until the stream was opened
  bool over_ = false;
};

}  // namespace

absl::StatusOr<std::string> ReplicationService::Call(std::string_view method, std::string_view request) {
  if (method != "Fence") {
    return absl::UnimplementedError(
        absl::StrFormat("gradwire.v1.Replication has no unary method '%s'", Printable(method)));
  }
  return HandleUnary<v1::FenceRequest>(request, [this](const auto& r) -> absl::StatusOr<v1::FenceReply> {
    GW_RETURN_IF_ERROR(replication_->Fence(r));
    return v1::FenceReply();
  });
}

absl::StatusOr<std::unique_ptr<transport::StreamSink>> ReplicationService::Accept(
    std::string_view method, std::shared_ptr<transport::Stream> stream) {
  if (method != "Follow") {
    return absl::UnimplementedError(absl::StrFormat("gradwire.v1.Replication has no stream '%s'", Printable(method)));
  }
  return std::make_unique<FollowSink>(replication_, std::make_shared<Outbox>(std::move(stream)));
}

}  // namespace gradwire
