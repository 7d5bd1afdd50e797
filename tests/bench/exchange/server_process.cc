// See server_process.h.
#include "tests/bench/exchange/server_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace gradwire::bench {
namespace {

constexpr auto kStartWithin = std::chrono::seconds(20);

void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace

ServerProcess::ServerProcess(const std::string& binary, const std::string& scheme) {
  const std::string port_file =
      std::filesystem::temp_directory_path() / ("gradwire-bench-" + std::to_string(getpid()) + ".addresses");
  std::remove(port_file.c_str());
  const std::string port_flag = "--port-file=" + port_file;
  const std::string listen_flag = "--listen=" + scheme + "://127.0.0.1:0";
  pid_ = fork();
  if (pid_ < 0) Fail("fork failed");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it must not outlive a benchmark that was killed
    execl(binary.c_str(), binary.c_str(), listen_flag.c_str(), port_flag.c_str(), "--log-level=warning",
          static_cast<char*>(nullptr));
    _exit(127);
  }
  const auto deadline = std::chrono::steady_clock::now() + kStartWithin;
  while (!std::getline(std::ifstream(port_file) >> std::ws, address_)) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0 || std::chrono::steady_clock::now() > deadline)
      Fail((binary + " did not start").c_str());
    std::this_thread::yield();
  }
  std::remove(port_file.c_str());
}

ServerProcess::~ServerProcess() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
}

double ServerProcess::CpuSeconds() const {
  clockid_t clock;
  timespec time{};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) Fail("the server has ended");
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace gradwire::bench
