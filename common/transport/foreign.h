// gRPC servers that are not ours: their messages carry no checks (grpc/message_codec.h).
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// As Dial; grpc:// and unix:// only.
absl::StatusOr<std::shared_ptr<Channel>> DialForeign(std::string_view address, const Limits& limits = {});

}  // namespace gradwire::transport
