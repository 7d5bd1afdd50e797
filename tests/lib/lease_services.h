// Where leases are kept, for tests: a real etcd, an API server of the tests that behaves like that of Kubernetes, and
// the real one where there is one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/lib/kube_server.h"

namespace gradwire::testing_support {

// A free port of the loopback; nobody has it yet.
int FreePort();

// A program for as long as this lives, then killed.
class Program {
 public:
  explicit Program(const std::vector<std::string>& arguments);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  // False where there is no such program.
  bool spawned() const { return pid_ > 0; }

 private:
  int pid_ = -1;
};

// Thread-compatible.
class LeaseService {
 public:
  virtual ~LeaseService() = default;
  // Why it cannot be used here; empty: it can.
  virtual std::string why_not() const = 0;
  // TCP, on the loopback. What goes there may be forwarded.
  virtual int port() const = 0;
  // The lease `key` (small letters, digits, '-') as MakeLease takes it, reached at `port`.
  virtual std::string AddressOf(const std::string& key, int port) const = 0;
};

// "etcd", "kubernetes" (of the tests) or "kube-apiserver" (Debian has no package of it: GRADWIRE_KUBE_APISERVER names
// the program). `folder`: an empty one of its own. It may take a while until it answers.
std::unique_ptr<LeaseService> StartLeaseService(const std::string& kind, const std::string& folder);
std::vector<std::string> LeaseServices();

}  // namespace gradwire::testing_support
