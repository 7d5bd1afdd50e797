// See server.h.
#include "client/python/src/server.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/python/src/raise.h"
#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "server/config/config.h"
#include "server/daemon.h"
#include "server/log_format.h"

namespace py = pybind11;

namespace gradwire {
namespace {

absl::StatusOr<ServerConfig> Parse(const std::vector<std::string>& flags) {
  std::vector<const char*> arguments = {"gradwire-server"};
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  absl::StatusOr<ParsedFlags> parsed = ParseFlags(static_cast<int>(arguments.size()), arguments.data());
  if (!parsed.ok()) return parsed.status();
  if (parsed->exit)
    return absl::InvalidArgumentError("flags: gradwire-server does not start with these, and has printed why");
  if (!parsed->config.port_file.empty())
    return absl::InvalidArgumentError("flags: --port-file is for other processes; this one knows the addresses");
  parsed->config.serves_own_process = true;
  return std::move(parsed->config);
}

class PyServer {
 public:
  explicit PyServer(const std::vector<std::string>& flags) { Check(Start(flags)); }
  ~PyServer() { (void)End(); }  // Drain has logged what is lost
  PyServer(const PyServer&) = delete;
  PyServer& operator=(const PyServer&) = delete;

  const std::vector<std::string>& addresses() const { return addresses_; }

  bool InUse() const {
    const std::shared_ptr<Daemon> daemon = daemon_;
    if (daemon == nullptr || forked()) return false;
    const py::gil_scoped_release release;
    const auto jobs = daemon->registry().All();
    return std::any_of(jobs.begin(), jobs.end(), [](const auto& job) { return job->UnusedFor() == 0; });
  }

  void Stop() { Check(End()); }

 private:
  absl::Status Start(const std::vector<std::string>& flags) {
    const py::gil_scoped_release release;
    GW_ASSIGN_OR_RETURN(const ServerConfig config, Parse(flags));
    LogToStandardError(config.log_level);
    GW_ASSIGN_OR_RETURN(daemon_, Daemon::Start(config, &clock_));
    addresses_ = daemon_->addresses();
    return absl::OkStatus();
  }

  // What Drain says. In a fork nothing can be ended: the threads are its parent's.
  absl::Status End() {
    if (daemon_ == nullptr) return absl::OkStatus();
    std::shared_ptr<Daemon> daemon = std::move(daemon_);
    if (forked()) {
      new std::shared_ptr<Daemon>(std::move(daemon));
      return absl::OkStatus();
    }
    const py::gil_scoped_release release;
    const absl::Status drained = daemon->Drain(/*drain_ms=*/0);
    daemon.reset();
    return drained;
  }

  bool forked() const { return getpid() != process_; }

  const pid_t process_ = getpid();
  SteadyClock clock_;
  std::shared_ptr<Daemon> daemon_;  // read and written with the GIL
  std::vector<std::string> addresses_;
};

}  // namespace

void AddServer(py::module_& m) {
  py::class_<PyServer>(m, "Server")
      .def(py::init<const std::vector<std::string>&>(), py::arg("flags"))
      .def_property_readonly("addresses", &PyServer::addresses)
      .def("in_use", &PyServer::InUse)
      .def("stop", &PyServer::Stop);
}

}  // namespace gradwire
