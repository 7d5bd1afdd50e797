// The plain TCP transport: tcp://host:port. Bytes: proto/TCP.md. No Boost type appears here; the headers stay in this
// folder. Neither encrypted nor authenticated: for networks that are trusted.
//
// A stream has a connection of its own, so that its flow control is the kernel's; calls share a few.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/transport/address.h"
#include "common/transport/caps.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Never waits for the peer. A name is looked up, on the calling thread, whenever a connection is made.
absl::StatusOr<std::shared_ptr<Channel>> DialTcp(const Address& address, const Limits& limits);

// Unavailable, with the system's reason, when the address cannot be bound.
absl::StatusOr<std::unique_ptr<Listener>> ListenTcp(const Address& address, Service* service, const Limits& limits,
                                                    const Caps& caps);

}  // namespace gradwire::transport
