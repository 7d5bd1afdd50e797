// absl::Status <-> grpc::Status, 1:1; the only place where they are converted.
#pragma once

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace gradwire::transport {

inline absl::Status FromGrpc(const ::grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  return absl::Status(code >= 1 && code <= 16 ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      status.error_message());
}

inline ::grpc::Status ToGrpc(const absl::Status& status) {
  // Messages travel in HTTP/2 trailers, whose default limit is 8 KiB, percent-encoded: up to three bytes for one.
  constexpr size_t kMaxMessageBytes = 2048;
  if (status.ok()) return ::grpc::Status::OK;
  return ::grpc::Status(static_cast<::grpc::StatusCode>(status.raw_code()),
                        std::string(status.message().substr(0, kMaxMessageBytes)));
}

}  // namespace gradwire::transport
