// Two servers that follow each other, and an etcd that says which of them is primary. Against the real etcd (Debian
// package etcd-server); without it all of this is skipped.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "server/lease/lease.h"
#include "server/replication/epoch.h"
#include "tests/integration/server/standby_fixture.h"
#include "tests/lib/tcp_proxy.h"

extern char** environ;

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::StandbyFixture;
using testing_support::TcpProxy;

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  close(fd);
  return ntohs(address.sin_port);
}

// An etcd of its own, for as long as it lives.
class EtcdProcess {
 public:
  explicit EtcdProcess(const std::string& directory) : port_(FreePort()) {
    const std::string client = absl::StrCat("http://127.0.0.1:", port_);
    const std::string peer = absl::StrCat("http://127.0.0.1:", FreePort());
    std::vector<std::string> arguments = {"etcd",
                                          "--data-dir",
                                          directory,
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
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    if (posix_spawnp(&pid_, "etcd", nullptr, nullptr, argv.data(), environ) != 0) pid_ = -1;
  }
  ~EtcdProcess() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  bool spawned() const { return pid_ > 0; }
  std::string address() const { return absl::StrCat("grpc://127.0.0.1:", port_); }

 private:
  const int port_;
  pid_t pid_ = -1;
};

class EtcdTest : public StandbyFixture {
 protected:
  void SetUp() override {
    etcd_ = std::make_unique<EtcdProcess>(root_ + "/etcd");
    if (!etcd_->spawned()) GTEST_SKIP() << "there is no etcd: deploy/bootstrap --chaos installs it";
    // Each server has its own way to etcd, which can be cut.
    for (auto [node, proxy, name] : {std::tuple{&primary_, &primary_way_, "one"}, {&standby_, &standby_way_, "two"}}) {
      *proxy = std::make_unique<TcpProxy>(etcd_->address());
      node->directory = name;
      node->lease = absl::StrCat("etcd://", (*proxy)->address().substr(sizeof("grpc://") - 1), "/gradwire/shard-0");
      node->address = absl::StrCat("inproc://etcd-test-", getpid(), "-", name, "-", Counter());
    }
    primary_.follow = standby_.address;
    standby_.follow = primary_.address;
    auto probe = MakeLease(absl::StrCat("etcd://", etcd_->address().substr(sizeof("grpc://") - 1), "/probe"),
                           {"probe", 5000}, &clock_);
    ASSERT_EQ(probe.status(), absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return (*probe)->Hold().ok(); })) << "etcd does not answer";
  }
  void TearDown() override {
    standby_.daemon.reset();
    primary_.daemon.reset();
  }
  static int Counter() {
    static int counter = 0;
    return ++counter;
  }
  static bool Serves(const Node& node) { return node.daemon->replication().CheckServing().ok(); }
  // Both started, primary_ first, with workers and a standby in sync.
  void StartAll(const v1::JobSpec& spec) {
    Start(primary_);
    ASSERT_TRUE(Eventually([&] { return Serves(primary_); }));
    Start(standby_);
    StartWorkers(spec);
    ASSERT_TRUE(Eventually([&] { return InSync(); }));
  }

  std::unique_ptr<EtcdProcess> etcd_;
  std::unique_ptr<TcpProxy> primary_way_, standby_way_;
};

TEST_F(EtcdTest, WhoeverHoldsTheLeaseServes) {
  const v1::JobSpec spec = Spec("tagc:density=0.05");
  const std::string expected = Undisturbed(spec, 9);
  StartAll(spec);
  if (HasFatalFailure()) return;
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  EXPECT_FALSE(Serves(standby_));
  const auto refused = standby_.daemon->replication().Promote(false);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the lease decides"));
  // It ends, and gives the lease back.
  primary_.daemon.reset();
  ASSERT_TRUE(Eventually([&] { return Serves(standby_); }));
  ResumeBoth(standby_, 3);
  for (uint64_t round = 3; round < 6; ++round) Step(round);
  // It comes back as the other's standby, and takes over again.
  Start(primary_);
  std::swap(primary_, standby_);
  std::swap(primary_way_, standby_way_);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_FALSE(Serves(standby_));
  Step(6);
  primary_.daemon.reset();
  ASSERT_TRUE(Eventually([&] { return Serves(standby_); }));
  EXPECT_EQ(TermOf(Shard(standby_).server_epoch()), 3u);
  ResumeBoth(standby_, 7);
  Step(7);
  Step(8);
  EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
}

TEST_F(EtcdTest, PrimaryThatCannotRenewIsFencedBeforeAnotherServes) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Step(0);
  primary_way_->Cut();
  ASSERT_TRUE(Eventually([&] {
    EXPECT_FALSE(Serves(primary_) && Serves(standby_));
    return Serves(standby_);
  }));
  EXPECT_FALSE(Serves(primary_));
  ResumeBoth(standby_, 1);
  Step(1);
  primary_way_->Heal();
  std::swap(primary_, standby_);
  std::swap(primary_way_, standby_way_);
  ASSERT_TRUE(Eventually([&] { return InSync(); })) << "it becomes the other's standby by itself";
  Step(2);
  EXPECT_EQ(Status(standby_).version(), 3u);
}

TEST_F(EtcdTest, NobodyServesWithoutEtcdAndTheSameServerGoesOnAfterwards) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Step(0);
  primary_way_->Cut();
  standby_way_->Cut();
  ASSERT_TRUE(Eventually([&] { return !Serves(primary_); }));
  EXPECT_FALSE(Serves(standby_));
  primary_way_->Heal();
  ASSERT_TRUE(Eventually([&] { return Serves(primary_); }));
  ResumeBoth(primary_, 1);
  Step(1);
  EXPECT_EQ(Status(primary_).version(), 2u);
}

TEST_F(EtcdTest, StandbyThatFellOutOfSyncDoesNotTakeOver) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Step(0);
  const uint64_t before = Shard(primary_).server_epoch();
  standby_.daemon.reset();
  Step(1);  // alone
  EXPECT_GT(Shard(primary_).server_epoch(), before) << "announced before anybody saw version 2";
  primary_.daemon.reset();
  Start(standby_);
  usleep(3'000'000);  // longer than the lease lives
  EXPECT_FALSE(Serves(standby_));
  EXPECT_EQ(Status(standby_).version(), 1u);
  // The one that has all of it goes on.
  Start(primary_);
  ASSERT_TRUE(Eventually([&] { return Serves(primary_); }));
  ResumeBoth(primary_, 2);
  Step(2);
}

TEST(LeaseAddress, IsChecked) {
  EXPECT_TRUE(CheckLeaseAddress("etcd://etcd:2379/gradwire/shard-0").ok());
  for (const char* wrong : {"", "etcd://etcd:2379", "etcd://etcd:2379/", "etcd:///key", "zookeeper://a:1/b",
                            "etcd://etcd/key", "etcd://etcd:99999/key"}) {
    EXPECT_EQ(CheckLeaseAddress(wrong).code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace gradwire
