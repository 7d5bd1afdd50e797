// gradwire-server as a process of its own, to be killed and started again.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace gradwire::testing_support {

// Not thread-safe. Killed, if it still runs, when this is destroyed.
class ServerProcess {
 public:
  // Listens on a free port of this machine, and with `flags`.
  explicit ServerProcess(std::vector<std::string> flags);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // Waits until it listens; empty when it does not within 20 s.
  std::string Address();
  void Signal(int number);
  pid_t pid() const { return pid_; }
  // The exit code, or minus the number of the signal that ended it.
  int WaitForExit();
  // SIGKILL, then another process with the same flags at the same address.
  void KillAndRestart();

 private:
  void Spawn(const std::string& listen);

  const std::vector<std::string> flags_;
  const std::string port_file_;
  pid_t pid_ = -1;
};

}  // namespace gradwire::testing_support
