// See lease_services.h.
#include "tests/lib/lease_services.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/config/environment.h"

extern char** environ;

namespace gradwire::testing_support {
namespace {

constexpr char kToken[] = "token-of-the-tests";

std::vector<std::string> EtcdCommand(const std::string& folder, int port) {
  const std::string client = absl::StrCat("http://127.0.0.1:", port);
  const std::string peer = absl::StrCat("http://127.0.0.1:", FreePort());
  return {"etcd",
          "--data-dir",
          folder + "/etcd",
          "--listen-client-urls",
          client,
          "--advertise-client-urls",
          client,
          "--listen-peer-urls",
          peer,
          "--initial-advertise-peer-urls",
          peer,
          "--initial-cluster",
          "default=" + peer,
          "--log-level",
          "fatal"};
}

// Where etcd's files lie: in memory where there is room, because it syncs every change and a busy disk then takes
// longer than a lease waits; else in `folder`.
class EtcdFolder {
 public:
  explicit EtcdFolder(const std::string& folder) : path_(InMemory().value_or(folder)), ours_(path_ != folder) {}
  ~EtcdFolder() {
    std::error_code ignored;
    if (ours_) std::filesystem::remove_all(path_, ignored);
  }
  EtcdFolder(const EtcdFolder&) = delete;
  EtcdFolder& operator=(const EtcdFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  static std::optional<std::string> InMemory() {
    constexpr uintmax_t kRoom = uintmax_t{1} << 29;  // etcd sets 64 MB aside for each of its logs
    RemoveOrphans();
    std::error_code why_not;
    const auto space = std::filesystem::space(kMemory, why_not);
    std::string path = absl::StrCat(kMemory, "/", kPrefix, getpid(), "-XXXXXX");
    if (why_not || space.available < kRoom || mkdtemp(path.data()) == nullptr) return std::nullopt;
    return path;
  }
  // Of tests that were killed.
  static void RemoveOrphans() {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(kMemory, ignored)) {
      const std::string name = entry.path().filename();
      if (!name.starts_with(kPrefix)) continue;
      const int process = std::atoi(name.c_str() + std::string_view(kPrefix).size());
      if (process > 0 && kill(process, 0) != 0 && errno == ESRCH) std::filesystem::remove_all(entry.path(), ignored);
    }
  }
  static constexpr char kMemory[] = "/dev/shm";
  static constexpr char kPrefix[] = "gradwire-etcd-";
  const std::string path_;
  const bool ours_;
};

class Etcd final : public LeaseService {
 public:
  explicit Etcd(const std::string& folder)
      : folder_(folder), port_(FreePort()), process_(EtcdCommand(folder_.path(), port_)) {}
  std::string why_not() const override {
    return process_.spawned() ? "" : "there is no etcd: deploy/bootstrap --chaos installs it";
  }
  int port() const override { return port_; }
  std::string AddressOf(const std::string& key, int port) const override {
    return absl::StrCat("etcd://127.0.0.1:", port, "/gradwire/", key);
  }

 private:
  const EtcdFolder folder_;
  const int port_;
  const Program process_;
};

class Kubernetes : public LeaseService {
 public:
  explicit Kubernetes(const std::string& folder) : certificate_(folder), token_file_(folder + "/token") {
    std::ofstream(token_file_) << kToken << "\n";
  }
  std::string AddressOf(const std::string& key, int port) const override {
    return absl::StrCat("kubernetes://default/", key, "?server=https://127.0.0.1:", port, "&token-file=", token_file_,
                        "&ca-file=", certificate_.certificate_file());
  }

 protected:
  const TestCertificate certificate_;

 private:
  const std::string token_file_;
};

class FakeKubernetes final : public Kubernetes {
 public:
  explicit FakeKubernetes(const std::string& folder) : Kubernetes(folder), server_(certificate_, kToken) {}
  std::string why_not() const override { return ""; }
  int port() const override { return server_.port(); }

 private:
  KubeServer server_;
};

class KubeApiserver final : public Kubernetes {
 public:
  explicit KubeApiserver(const std::string& folder)
      : Kubernetes(folder),
        etcd_folder_(folder),
        etcd_(EtcdCommand(etcd_folder_.path(), etcd_port_)),
        process_(Command(folder)) {}
  std::string why_not() const override {
    if (Path().empty()) return "GRADWIRE_KUBE_APISERVER names no kube-apiserver";
    return etcd_.spawned() && process_.spawned() ? "" : "kube-apiserver or etcd cannot be started";
  }
  int port() const override { return port_; }

 private:
  static std::string Path() { return EnvironmentVariable("GRADWIRE_KUBE_APISERVER"); }
  std::vector<std::string> Command(const std::string& folder) const {
    std::ofstream(folder + "/tokens.csv") << kToken << ",tests,1,\"system:masters\"\n";
    const std::string key = certificate_.key_file();
    return {Path(),
            absl::StrCat("--etcd-servers=http://127.0.0.1:", etcd_port_),
            "--bind-address=127.0.0.1",
            absl::StrCat("--secure-port=", port_),
            absl::StrCat("--tls-cert-file=", certificate_.certificate_file()),
            absl::StrCat("--tls-private-key-file=", key),
            absl::StrCat("--token-auth-file=", folder, "/tokens.csv"),
            "--service-account-issuer=https://tests",
            absl::StrCat("--service-account-key-file=", key),
            absl::StrCat("--service-account-signing-key-file=", key),
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC"};
  }

  const EtcdFolder etcd_folder_;
  const int etcd_port_ = FreePort();
  const int port_ = FreePort();
  const Program etcd_;
  const Program process_;
};

}  // namespace

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(fd);
  return bound ? ntohs(address.sin_port) : 0;
}

Program::Program(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  if (posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
}

Program::~Program() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::unique_ptr<LeaseService> StartLeaseService(const std::string& kind, const std::string& folder) {
  std::filesystem::create_directories(folder);
  if (kind == "etcd") return std::make_unique<Etcd>(folder);
  if (kind == "kubernetes") return std::make_unique<FakeKubernetes>(folder);
  return std::make_unique<KubeApiserver>(folder);
}

std::vector<std::string> LeaseServices() { return {"etcd", "kubernetes", "kube-apiserver"}; }

}  // namespace gradwire::testing_support
