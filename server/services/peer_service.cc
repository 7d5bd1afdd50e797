// See peer_service.h.
#include "server/services/peer_service.h"

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "gradwire/v1/peer.pb.h"
#include "server/services/unary.h"

namespace gradwire {

absl::StatusOr<std::string> PeerService::Call(std::string_view method, std::string_view request) {
  if (method != "Exchange") {
    return absl::UnimplementedError(absl::StrFormat("gradwire.v1.Peer has no unary method '%s'", Printable(method)));
  }
  return HandleUnary<v1::ExchangeRequest>(request, [this](const auto& r) -> absl::StatusOr<v1::ExchangeReply> {
    GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(r.job()));
    if (job->agreement() != nullptr) return job->agreement()->exchange().Take(r);
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s' has nothing that its shards agree on", job->job().spec().name()));
  });
}

}  // namespace gradwire
