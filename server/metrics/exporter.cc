// prometheus-cpp's HTTP server around ToFamilies; see exporter.h.
#include "server/metrics/exporter.h"

#include <netdb.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/transport/address.h"
#include "server/metrics/families.h"

namespace gradwire::metrics {
namespace {

constexpr char kPath[] = "/metrics";
constexpr char kThreads[] = "2";              // one scraper, and a person beside it
constexpr char kRequestTimeoutMs[] = "5000";  // of clients that say nothing: each keeps a thread

class Source final : public prometheus::Collectable {
 public:
  explicit Source(std::function<Reading()> read) : read_(std::move(read)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families;
    CatchBadAlloc("a scrape of the metrics", [&] {
      families = ToFamilies(read_());
      return absl::OkStatus();
    }).IgnoreError();  // an empty page: the scraper sees that the server is there
    return families;
  }

 private:
  const std::function<Reading()> read_;
};

absl::StatusOr<transport::Address> Parse(const std::string& listen) {
  absl::StatusOr<transport::Address> address = transport::ParseAddress(absl::StrCat("tcp://", listen));
  if (address.ok()) return address;
  return absl::InvalidArgumentError(absl::StrFormat(
      "metrics_listen is '%s'; give HOST:PORT, for example 127.0.0.1:9464, 0.0.0.0:9464 or [::1]:9464", listen));
}

std::string HostPort(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]:" : ":", port);
}

absl::Status CannotListen(const std::string& listen, const std::string& why) {
  return absl::UnavailableError(
      absl::StrFormat("cannot serve metrics on %s: %s; give another --metrics-listen, or none", listen, why));
}

// Numeric, which is what the HTTP server takes. Sets `why` to what stops a socket from listening there, or leaves it.
absl::StatusOr<std::string> Resolve(const transport::Address& address, const std::string& listen, std::string* why) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return CannotListen(listen, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  char host[NI_MAXHOST];
  if (const int error = getnameinfo(found->ai_addr, found->ai_addrlen, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
      error != 0) {
    return CannotListen(listen, gai_strerror(error));
  }
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(fd, found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd, 1) != 0) {
    *why = errno == EADDRINUSE ? "address in use" : std::strerror(errno);
  }
  if (fd >= 0) close(fd);
  return std::string(host);
}

}  // namespace

absl::Status CheckListenAddress(const std::string& listen) { return Parse(listen).status(); }

Exporter::Exporter() = default;
Exporter::~Exporter() = default;

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Start(const std::string& listen, std::function<Reading()> read) {
  GW_ASSIGN_OR_RETURN(const transport::Address address, Parse(listen));
  std::string why;  // asked first: the HTTP server does not tell
  GW_ASSIGN_OR_RETURN(const std::string host, Resolve(address, listen, &why));
  if (!why.empty()) return CannotListen(listen, why);
  std::unique_ptr<Exporter> exporter(new Exporter());
  try {  // the edge of prometheus-cpp, which reports by exceptions
    exporter->exposer_ = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", HostPort(host, address.port), "num_threads", kThreads,
                                 "request_timeout_ms", kRequestTimeoutMs});
    exporter->source_ = std::make_shared<Source>(std::move(read));
    exporter->exposer_->RegisterCollectable(exporter->source_, kPath);
    exporter->url_ =
        absl::StrCat("http://", HostPort(address.host, exporter->exposer_->GetListeningPorts().at(0)), kPath);
  } catch (const std::exception& error) {
    return CannotListen(listen, error.what());
  }
  spdlog::info("metrics on {}", exporter->url_);
  return exporter;
}

}  // namespace gradwire::metrics
