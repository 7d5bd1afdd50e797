// See server_process.h.
#include "tests/lib/server_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>
#include <utility>

extern char** environ;

namespace gradwire::testing_support {
namespace {

std::string PortFile() {
  static std::atomic<int> number{0};
  return testing::TempDir() + "/gradwire-port-" + std::to_string(getpid()) + "-" + std::to_string(number.fetch_add(1));
}

}  // namespace

ServerProcess::ServerProcess(std::vector<std::string> flags) : flags_(std::move(flags)), port_file_(PortFile()) {
  Spawn("grpc://127.0.0.1:0");
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::remove(port_file_.c_str());
}

void ServerProcess::Spawn(const std::string& listen) {
  std::remove(port_file_.c_str());
  std::vector<std::string> arguments = {GRADWIRE_SERVER_BINARY, "--listen=" + listen, "--port-file=" + port_file_};
  arguments.insert(arguments.end(), flags_.begin(), flags_.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  EXPECT_EQ(posix_spawn(&pid_, GRADWIRE_SERVER_BINARY, nullptr, nullptr, argv.data(), environ), 0);
}

std::string ServerProcess::Address() {
  std::string address;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (address.empty() && std::chrono::steady_clock::now() < deadline) {
    std::ifstream(port_file_) >> address;
    std::this_thread::yield();
  }
  return address;
}

void ServerProcess::Signal(int number) { kill(pid_, number); }

int ServerProcess::WaitForExit() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void ServerProcess::KillAndRestart() {
  const std::string address = Address();
  Signal(SIGKILL);
  WaitForExit();
  Spawn(address);
}

}  // namespace gradwire::testing_support
