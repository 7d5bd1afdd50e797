// A gradwire-server of its own for one run of a benchmark: started on a free port, ended and waited for at the end.
#pragma once

#include <sys/types.h>

#include <string>

namespace gradwire::bench {

class ServerProcess {
 public:
  // Starts `binary`, listening on a free port of the loopback with `scheme`; returns when it does, exits the program
  // when it does not within 20 s.
  ServerProcess(const std::string& binary, const std::string& scheme);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  // User and system time of all of its threads so far.
  double CpuSeconds() const;

 private:
  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace gradwire::bench
