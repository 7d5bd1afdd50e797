// Who is primary, decided outside of the servers: whoever holds the lease. Contract: proto/REPLICATION.md, "Leases".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"

namespace gradwire {

// Used by one thread at a time. Calls block, each for about a third of the time to live at most.
class Lease {
 public:
  struct State {
    bool held = false;   // by this server
    TimeNs until = 0;    // held: at least until then, on the clock that the lease was made with
    std::string holder;  // not held: who holds it, where that is known
    // Who announced itself last; it stays when the lease ends. Epoch 0: nobody has.
    std::string last_primary;
    uint64_t last_epoch = 0;
  };

  virtual ~Lease() = default;
  // Takes the lease where it is free, renews it where it is held. An error says nothing: what was held may be held.
  virtual absl::StatusOr<State> Hold() = 0;
  // Writes down that this server is the primary, with `epoch`. Aborted: the lease is not held any more.
  virtual absl::Status Announce(uint64_t epoch) = 0;
  // Gives the lease back, so that somebody else need not wait for its end.
  virtual void Release() = 0;
};

struct LeaseOptions {
  std::string holder;  // name of this server
  int64_t ttl_ms = 10'000;
};

// `text`: etcd://HOST:PORT/KEY, or kubernetes://NAMESPACE/NAME (kubernetes_address.h). `clock` outlives the lease.
// InvalidArgument for anything else.
absl::StatusOr<std::unique_ptr<Lease>> MakeLease(std::string_view text, const LeaseOptions& options, Clock* clock);
// The same check, without a lease.
absl::Status CheckLeaseAddress(std::string_view text);

}  // namespace gradwire
