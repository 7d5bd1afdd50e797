// gradwire-server: flags, signals, exit codes. Everything else is in daemon.h.
#include <fcntl.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "common/base/clock.h"
#include "common/base/failpoint.h"
#include "common/config/environment.h"
#include "common/transport/malloc_tuning.h"
#include "server/config/config.h"
#include "server/daemon.h"
#include "server/log_format.h"

namespace gradwire {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitFailed = 1;

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

int WaitForSignal(const sigset_t& set) {
  int number = 0;
  sigwait(&set, &number);
  return number;
}

// While this lives, a signal ends the process at once: what is on disk is as after a kill, which recovery is made for.
class ExitsOnSignal {
 public:
  explicit ExitsOnSignal(const char* said)
      : thread_([said](std::stop_token stop) {
          sigset_t signals = StopSignals();
          sigaddset(&signals, kStop);
          const int number = WaitForSignal(signals);
          if (number == kStop) return;
          if (stop.stop_requested()) {  // it came for whoever waits next
            kill(getpid(), number);
            return;
          }
          spdlog::warn("{}: exiting at once", said);
          _exit(kExitFailed);
        }) {}
  ~ExitsOnSignal() {
    thread_.request_stop();
    pthread_kill(thread_.native_handle(), kStop);
  }

  static constexpr int kStop = SIGUSR1;  // of this thread; blocked in all

 private:
  std::jthread thread_;
};

// Written beside and renamed, so that a reader sees all of it or nothing. No link is followed: the file beside is new,
// with a name that nobody knows before, and a link at `path` is replaced.
bool WriteAddresses(const std::string& path, const std::vector<std::string>& addresses) {
  constexpr mode_t kForEverybody = 0644;
  std::string temporary = path + ".XXXXXX";
  const int descriptor = mkostemp(temporary.data(), O_CLOEXEC);
  if (descriptor < 0) return false;
  std::FILE* const file = fdopen(descriptor, "w");
  if (file == nullptr) {
    close(descriptor);
    unlink(temporary.c_str());
    return false;
  }
  bool written = fchmod(descriptor, kForEverybody) == 0;
  for (const std::string& address : addresses) written = std::fprintf(file, "%s\n", address.c_str()) > 0 && written;
  written = std::fclose(file) == 0 && written && std::rename(temporary.c_str(), path.c_str()) == 0;
  if (written) return true;
  const int error = errno;
  unlink(temporary.c_str());
  errno = error;
  return false;
}

int Main(int argc, char** argv) {
  // What gRPC writes to standard error on its own repeats our errors, less clearly. GRPC_VERBOSITY=ERROR brings it
  // back.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  RaiseDescriptorLimit();
  const absl::StatusOr<ParsedFlags> flags = ParseFlags(argc, argv);
  if (!flags.ok()) {
    std::fprintf(stderr, "gradwire-server: %s\n", std::string(flags.status().message()).c_str());
    return kExitUsage;
  }
  if (flags->exit) return flags->exit_code;
  const ServerConfig& config = flags->config;
  if (const absl::Status armed = failpoint::Arm(EnvironmentVariable(failpoint::kVariable)); !armed.ok()) {
    std::fprintf(stderr, "gradwire-server: %s\n", std::string(armed.message()).c_str());
    return kExitUsage;
  }
  SetLogFormat();
  spdlog::set_level(spdlog::level::from_str(config.log_level));
  spdlog::flush_on(spdlog::level::info);

  // Blocked before any thread starts: every thread inherits it, and only WaitForSignal takes them.
  const sigset_t signals = StopSignals();
  sigset_t blocked = signals;
  sigaddset(&blocked, ExitsOnSignal::kStop);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  transport::TuneMalloc();
  SteadyClock clock;
  std::optional<ExitsOnSignal> hasty(std::in_place, "signal before this server was ready");
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(config, &clock);
  hasty.reset();
  if (!daemon.ok()) {
    spdlog::error("cannot start: {}", daemon.status().ToString());
    return kExitFailed;
  }
  if (!config.port_file.empty() && !WriteAddresses(config.port_file, (*daemon)->addresses())) {
    spdlog::error("cannot write --port-file '{}': {}", config.port_file, std::strerror(errno));
    return kExitFailed;
  }
  const int first = WaitForSignal(signals);
  spdlog::info("signal {}: draining for up to {} ms; another signal exits at once", first, config.drain_ms);
  std::optional<ExitsOnSignal> impatient(std::in_place, "second signal");
  const absl::Status drained = (*daemon)->Drain(config.drain_ms);
  daemon->reset();
  impatient.reset();
  spdlog::info("stopped");
  return drained.ok() ? 0 : kExitFailed;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) { return gradwire::Main(argc, argv); }
