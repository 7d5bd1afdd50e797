// One unary call: parse the request, run the handler, serialize the reply.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "server/job/job_registry.h"

namespace gradwire {

// `handler`: (const Request&) -> absl::StatusOr<Reply>. InvalidArgument when `bytes` is not a Request.
template <typename Request, typename Handler>
absl::StatusOr<std::string> HandleUnary(std::string_view bytes, Handler handler) {
  Request request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d bytes are not a %s", bytes.size(), std::string(Request::descriptor()->full_name())));
  }
  auto reply = handler(request);
  if (!reply.ok()) return reply.status();
  return reply->SerializeAsString();
}

// The same of a call whose refusal the log tells: `method` of one that jobs begin with.
template <typename Request, typename Handler>
absl::StatusOr<std::string> HandleToldUnary(JobRegistry* registry, std::string_view method, std::string_view bytes,
                                            Handler handler) {
  absl::StatusOr<std::string> reply = HandleUnary<Request>(bytes, std::move(handler));
  if (!reply.ok()) registry->WarnRefused(method, reply.status());
  return reply;
}

}  // namespace gradwire
