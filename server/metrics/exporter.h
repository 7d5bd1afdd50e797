// The page that Prometheus scrapes: http://HOST:PORT/metrics. It is made when it is asked for, by a thread of the HTTP
// server, from what the status is then.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/metrics/reading.h"

namespace prometheus {
class Exposer;
class Collectable;
}  // namespace prometheus

namespace gradwire::metrics {

// InvalidArgument unless `listen` is HOST:PORT.
absl::Status CheckListenAddress(const std::string& listen);

// Thread-safe. Owns the threads of the HTTP server, a fixed number; they end with it.
class Exporter {
 public:
  // `read` is called by several threads until the exporter is destroyed. Port 0 takes a free one. Errors: those of
  // CheckListenAddress; Unavailable (the host is not known, or nothing can listen there; says why).
  static absl::StatusOr<std::unique_ptr<Exporter>> Start(const std::string& listen, std::function<Reading()> read);
  ~Exporter();
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  // http://HOST:PORT/metrics
  const std::string& url() const { return url_; }

 private:
  Exporter();

  std::shared_ptr<prometheus::Collectable> source_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string url_;
};

}  // namespace gradwire::metrics
