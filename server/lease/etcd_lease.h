// A lease in etcd v3: a key that lives as long as etcd's lease on it. Beside it, KEY/last names the last primary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/transport/transport.h"
#include "server/lease/lease.h"

namespace gradwire {

class EtcdLease final : public Lease {
 public:
  // `channel`: to etcd. `key`: the same for all servers that stand in for each other, and for nobody else.
  EtcdLease(std::shared_ptr<transport::Channel> channel, std::string key, LeaseOptions options, Clock* clock);
  ~EtcdLease() override;

  absl::StatusOr<State> Hold() override;
  absl::Status Announce(uint64_t epoch) override;
  void Release() override;

 private:
  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Call(const char* method, const Request& request);
  // Milliseconds that etcd has added; 0: the lease has ended.
  absl::StatusOr<int64_t> KeepAlive();
  absl::StatusOr<int64_t> Grant();

  const std::shared_ptr<transport::Channel> channel_;
  const std::string key_;
  const std::string last_key_;
  const LeaseOptions options_;
  Clock* const clock_;
  int64_t id_ = 0;  // of etcd's lease; 0: there is none
};

}  // namespace gradwire
