// The gRPC transport: grpc://host:port and unix:///path. No gRPC type appears here; the headers stay in this folder.
//
// A stream message on the wire is the control protobuf followed by field 15 with the frame (message_codec.h), so any
// gRPC client that knows the .proto files can speak to a listener.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/transport/address.h"
#include "common/transport/caps.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Never blocks: the connection is made by the first call and made anew after it was lost.
// `checks`: the server is one of ours, and its messages carry checks (message_codec.h).
// Destroying the channel cancels its open streams and waits for their OnClosed; not to be done inside a sink.
absl::StatusOr<std::shared_ptr<Channel>> DialGrpc(const Address& address, const Limits& limits, bool checks);

// Serves gradwire.v1.Worker and gradwire.v1.Operator by `service`, and grpc.health.v1 and server reflection beside
// them. Unavailable, with the system's reason, when the address cannot be bound.
absl::StatusOr<std::unique_ptr<Listener>> ListenGrpc(const Address& address, Service* service, const Limits& limits,
                                                     const Caps& caps);

}  // namespace gradwire::transport
