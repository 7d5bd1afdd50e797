// grpc.health.v1 and server reflection, written against transport::Service like any other service. gRPC's own bring
// threads that wait on the same sockets as ours, and every event then wakes the wrong one half of the time.
#pragma once

#include <google/protobuf/descriptor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

inline constexpr char kHealthName[] = "grpc.health.v1.Health";
inline constexpr char kReflectionName[] = "grpc.reflection.v1.ServerReflection";
inline constexpr char kReflectionAlphaName[] = "grpc.reflection.v1alpha.ServerReflection";

// Thread-safe. Health knows "" and the names of `services`, all with the same status, not serving at first.
class BuiltinServices final : public Service {
 public:
  explicit BuiltinServices(std::vector<std::string> services) : services_(std::move(services)) {}

  void SetServing(bool serving) ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<std::string> Call(Method method, std::string_view request) override;
  absl::StatusOr<std::unique_ptr<StreamSink>> Accept(Method method, std::shared_ptr<Stream> stream) override;

 private:
  friend class WatchSink;

  bool Knows(const std::string& service) const;
  void AddWatcher(StreamSink* key, std::shared_ptr<Stream> stream, const std::string& service) ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveWatcher(StreamSink* key) ABSL_LOCKS_EXCLUDED(mu_);

  const std::vector<std::string> services_;
  absl::Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  std::map<StreamSink*, std::shared_ptr<Stream>> watchers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::transport
