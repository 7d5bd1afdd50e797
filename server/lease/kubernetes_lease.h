// A lease as an object of Kubernetes: a Lease of coordination.k8s.io/v1, as the leaders of its own controllers are
// elected. Every write names the resourceVersion that it replaces, so of two writers one is refused. Whether another
// server's lease has ended is decided by how long this server has not seen the object change, on its own clock: clocks
// are never compared.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/lease/https_client.h"
#include "server/lease/kubernetes_address.h"
#include "server/lease/lease.h"
#include "server/lease/lease_object.h"

namespace gradwire {

class KubernetesLease final : public Lease {
 public:
  // `incarnation`: another one for every start of the process, so that nobody takes its predecessor's lease for its
  // own.
  KubernetesLease(KubernetesAddress where, LeaseOptions options, uint64_t incarnation, Clock* clock);
  ~KubernetesLease() override;

  absl::StatusOr<State> Hold() override;
  absl::Status Announce(uint64_t epoch) override;
  void Release() override;

 private:
  // What was seen of a lease that is not ours.
  struct Foreign {
    std::string version;  // empty: the object was gone
    int64_t lives_ms = 0;
    TimeNs since = 0;  // not changed
  };

  // One try of each: AlreadyExists where somebody else wrote between our reading and writing.
  absl::StatusOr<State> HoldOnce(TimeNs give_up);
  absl::Status AnnounceOnce(TimeNs give_up, uint64_t epoch);
  absl::Status ReleaseOnce(TimeNs give_up);
  // Has the lease of others ended, as far as this server has seen?
  bool SeenToEnd(const std::string& version, int64_t lives_ms);

  // None: there is no such object.
  absl::StatusOr<std::optional<LeaseObject>> Get(TimeNs give_up);
  // Makes it where it has no version, else replaces that version. AlreadyExists: somebody else was there first.
  absl::StatusOr<LeaseObject> Put(const LeaseObject& object, TimeNs give_up);
  absl::StatusOr<HttpsReply> Call(const char* method, const std::string& target, std::string body, TimeNs give_up);
  absl::Status Refusal(const HttpsReply& reply, const char* verb) const;
  TimeNs GiveUp() const;

  const KubernetesAddress where_;
  const LeaseOptions options_;
  const std::string identity_;
  const std::string objects_;  // the path of all leases of the namespace
  Clock* const clock_;
  const HttpsClient client_;
  bool may_hold_ = false;  // it was written that this server holds it, or that may yet arrive
  std::optional<Foreign> foreign_;
  TimeNs not_before_ = 0;  // the server wants no requests until then
  // As known last, in case the object is made anew.
  std::string last_primary_;
  uint64_t last_epoch_ = 0;
};

}  // namespace gradwire
