// Method names to handlers; see dispatcher.h.
#include "server/services/dispatcher.h"

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr std::string_view kWorker = "gradwire.v1.Worker/";
constexpr std::string_view kOperator = "gradwire.v1.Operator/";
constexpr std::string_view kReplication = "gradwire.v1.Replication/";
constexpr std::string_view kPeer = "gradwire.v1.Peer/";

absl::Status Unknown(std::string_view method) {
  return absl::UnimplementedError(absl::StrFormat("this server has no method '%s'", Printable(method)));
}

}  // namespace

absl::StatusOr<std::string> Dispatcher::Call(transport::Method method, std::string_view request) {
  return CatchBadAlloc(method, [&]() -> absl::StatusOr<std::string> {
    if (method.starts_with(kWorker)) {
      GW_RETURN_IF_ERROR(replication_->CheckServing());
      absl::StatusOr<std::string> reply = worker_->Call(method.substr(kWorker.size()), request);
      // What a server says of its jobs while it becomes a standby is not so.
      if (!reply.ok()) GW_RETURN_IF_ERROR(replication_->CheckServing());
      return reply;
    }
    if (method.starts_with(kPeer)) {
      GW_RETURN_IF_ERROR(replication_->CheckServing());
      return peers_->Call(method.substr(kPeer.size()), request);
    }
    if (method.starts_with(kOperator)) return operator_->Call(method.substr(kOperator.size()), request);
    if (method.starts_with(kReplication)) return standbys_->Call(method.substr(kReplication.size()), request);
    return Unknown(method);
  });
}

absl::StatusOr<std::unique_ptr<transport::StreamSink>> Dispatcher::Accept(transport::Method method,
                                                                          std::shared_ptr<transport::Stream> stream) {
  return CatchBadAlloc(method, [&]() -> absl::StatusOr<std::unique_ptr<transport::StreamSink>> {
    if (method.starts_with(kWorker)) {
      GW_RETURN_IF_ERROR(replication_->CheckServing());
      return worker_->Accept(method.substr(kWorker.size()), std::move(stream));
    }
    if (method.starts_with(kReplication)) {
      return standbys_->Accept(method.substr(kReplication.size()), std::move(stream));
    }
    return Unknown(method);
  });
}

}  // namespace gradwire
