// What the peers of one listener together may take of it. Apart from transport.h: only who listens for strangers sets
// it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

struct Caps {
  // Beyond it the connection that has been of no use for longest makes room; where all are in use, the new one is
  // closed.
  int max_connections = 16384;
  int max_handshakes = 1024;  // connections that have not said what they want yet
  int max_streams = 8192;     // open ones; one more is refused with ResourceExhausted
  // Of messages that have come in part (tcp://): beyond it the connection whose message began first is closed.
  size_t receive_bytes = 512u << 20;
  // Hears what was refused or closed for these, at most once in ten seconds; may be empty. From any thread.
  std::function<void(const std::string&)> warn = nullptr;
};

// As Listen of transport.h. An inproc:// listener has no strangers and takes no caps.
absl::StatusOr<std::unique_ptr<Listener>> ListenWithin(std::string_view address, Service* service, const Limits& limits,
                                                       const Caps& caps);

}  // namespace gradwire::transport
