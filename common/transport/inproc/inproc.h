// The inproc transport: named endpoints inside one process, for a first try, for tests and for several parties in one
// program. Messages are handed over, never serialized or copied.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/address.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

class InprocEndpoint;  // endpoint.h

// Names of endpoints that listen. Thread-safe. Outlives every channel and listener made with it.
class InprocRegistry {
 public:
  // Unavailable when the name is taken.
  absl::Status Add(const std::string& name, std::shared_ptr<InprocEndpoint> endpoint) ABSL_LOCKS_EXCLUDED(mu_);
  void Remove(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Null when nobody listens, and in a fork of who does, which has none of its threads.
  std::shared_ptr<InprocEndpoint> Find(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<InprocEndpoint>> endpoints_ ABSL_GUARDED_BY(mu_);
};

// The registry behind Dial("inproc://...") and Listen: the one process-wide object here, because the name of an
// endpoint means the same everywhere in a process. It owns no threads and no connections. Code that wants names of its
// own passes a registry of its own to the functions below.
InprocRegistry& ProcessInprocRegistry();

// Never blocks: a call finds the endpoint when it is made, so a channel survives the listener and finds its successor.
// Destroying the channel cancels its open streams and waits for their OnClosed; not to be done inside a sink.
absl::StatusOr<std::shared_ptr<Channel>> DialInproc(InprocRegistry& registry, const Address& address,
                                                    const Limits& limits);
absl::StatusOr<std::unique_ptr<Listener>> ListenInproc(InprocRegistry& registry, const Address& address,
                                                       Service* service, const Limits& limits);

}  // namespace gradwire::transport
