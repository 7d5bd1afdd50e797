// An API server for tests that knows Leases alone, and treats them as that of Kubernetes does: resourceVersions,
// conflicts, validation, tokens. It can also be told to behave badly.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire::testing_support {

// A certificate for 127.0.0.1 that signs itself, made by the openssl program.
class TestCertificate {
 public:
  // Written into `folder`. `names`: its subjectAltName.
  explicit TestCertificate(const std::string& folder, const std::string& names = "IP:127.0.0.1");
  const std::string& certificate_file() const { return certificate_file_; }
  const std::string& key_file() const { return key_file_; }

 private:
  std::string certificate_file_, key_file_;
};

// Thread-safe. A thread for every connection, on each of which one request is answered.
class KubeServer {
 public:
  struct Reply {
    unsigned status = 0;
    nlohmann::json body = nullptr;
    std::map<std::string, std::string> headers = {};
    std::string text = {};  // instead of `body`
    bool raw = false;       // `text` is all that is sent, without HTTP's head
    bool silent = false;    // nothing is sent; the connection stays until the client has gone
    bool lost = false;      // the request has its effect, but nothing is answered
  };

  KubeServer(const TestCertificate& certificate, std::string token);
  ~KubeServer();
  KubeServer(const KubeServer&) = delete;
  KubeServer& operator=(const KubeServer&) = delete;

  int port() const { return port_; }
  // The next request of `method` is answered by that, one after the other.
  void Next(const std::string& method, Reply reply);
  void SetToken(const std::string& token);
  void SetForbidden(bool forbidden);
  // Lease `name` of namespace default; null: there is none.
  nlohmann::json Get(const std::string& name) const;
  // Changes it as another client would.
  void Edit(const std::string& name, const nlohmann::json& patch);
  void Remove(const std::string& name);
  int requests() const;

 private:
  struct Tls;
  void Accept();
  void Serve(int socket);
  Reply Answer(const std::string& method, const std::string& target, const std::string& authorization,
               const std::string& body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Reply Write(const std::string& name, const std::string& body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::unique_ptr<Tls> tls_;
  int port_ = 0;
  mutable absl::Mutex mu_;
  std::map<std::string, nlohmann::json> leases_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::deque<Reply>> next_ ABSL_GUARDED_BY(mu_);  // by method
  std::string token_ ABSL_GUARDED_BY(mu_);
  bool forbidden_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  int requests_ ABSL_GUARDED_BY(mu_) = 0;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::set<int> open_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::thread acceptor_;
};

}  // namespace gradwire::testing_support
