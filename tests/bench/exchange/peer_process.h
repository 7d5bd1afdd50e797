// A second process of the same program, so that sender and receiver have a heap, threads and CPU time of their own.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace gradwire::bench {

// CPU time of the calling process, user and system.
double OwnCpuSeconds();

// Keeps the calling thread, and those that it starts from now on, on one core. Where there is no such core, it does
// nothing.
void StayOn(int core);

// Starts /proc/self/exe with `arguments`; the child must call ServePeer. Destroying it ends the child and waits.
class PeerProcess {
 public:
  explicit PeerProcess(const std::vector<std::string>& arguments);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // What the child said it listens on.
  const std::string& address() const { return address_; }
  double CpuSeconds();

 private:
  std::string ReadLine();

  pid_t pid_ = -1;
  int to_child_ = -1;
  int from_child_ = -1;
  std::string address_;
};

// In the child: tells the parent the address, answers its questions, returns when the parent is gone.
void ServePeer(const std::string& address);

}  // namespace gradwire::bench
