// Two servers that follow each other, and a lease that says which of them is primary: in a real etcd (without it that
// is skipped), and in an API server that behaves like that of Kubernetes.
#include "server/lease/lease.h"

#include <gmock/gmock.h>

#include "absl/cleanup/cleanup.h"
#include "server/replication/epoch.h"
#include "tests/integration/server/slow_jobs.h"
#include "tests/integration/server/standby_fixture.h"
#include "tests/lib/lease_services.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FreePort;
using testing_support::LeaseService;
using testing_support::LeaseServices;
using testing_support::SlowGate;
using testing_support::SlowJobs;
using testing_support::StandbyFixture;
using testing_support::StartLeaseService;
using testing_support::TcpProxy;

class LeasePairTest : public StandbyFixture, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    service_ = StartLeaseService(GetParam(), root_ + "/leases");
    if (!service_->why_not().empty()) GTEST_SKIP() << service_->why_not();
    // Each server has its own way to the lease, which can be cut.
    for (auto [node, proxy, name] : {std::tuple{&primary_, &primary_way_, "one"}, {&standby_, &standby_way_, "two"}}) {
      *proxy = std::make_unique<TcpProxy>(absl::StrCat("grpc://127.0.0.1:", service_->port()));
      const std::string address = (*proxy)->address();
      node->directory = name;
      node->lease = service_->AddressOf("shard-0", std::stoi(address.substr(address.rfind(':') + 1)));
      node->address = absl::StrCat("inproc://lease-test-", getpid(), "-", name, "-", Counter());
    }
    primary_.follow = standby_.address;
    standby_.follow = primary_.address;
    auto probe = MakeLease(service_->AddressOf("probe", service_->port()), {"probe", 5000}, &clock_);
    ASSERT_EQ(probe.status(), absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return (*probe)->Hold().ok(); })) << "it does not answer";
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
  // The primary ends, and `round` is the standby's.
  void TakeOver(uint64_t round) {
    primary_.daemon.reset();
    ASSERT_TRUE(Eventually([&] { return Serves(standby_); }));
    ResumeBoth(standby_, round);
    Step(round);
  }

  std::unique_ptr<LeaseService> service_;
  std::unique_ptr<TcpProxy> primary_way_, standby_way_;
};

TEST_P(LeasePairTest, WhoeverHoldsTheLeaseServes) {
  const v1::JobSpec spec = Spec("tagc:density=0.05");
  const std::string expected = Undisturbed(spec, 9);
  StartAll(spec);
  if (HasFatalFailure()) return;
  for (uint64_t round = 0; round < 3; ++round) Step(round);
  EXPECT_FALSE(Serves(standby_));
  const auto refused = standby_.daemon->replication().Promote(false);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the lease decides"));
  // It ends, and gives the lease back.
  TakeOver(3);
  Step(4);
  Step(5);
  // It comes back as the other's standby, and takes over again.
  Start(primary_);
  std::swap(primary_, standby_);
  std::swap(primary_way_, standby_way_);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  EXPECT_FALSE(Serves(standby_));
  Step(6);
  TakeOver(7);
  EXPECT_EQ(TermOf(Shard(standby_).server_epoch()), 3u);
  Step(8);
  EXPECT_EQ(Status(standby_).parameters_sha256(), expected);
}

TEST_P(LeasePairTest, PrimaryThatCannotRenewIsFencedBeforeAnotherServes) {
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

TEST_P(LeasePairTest, NobodyServesWithoutTheLeaseAndTheSameServerGoesOnAfterwards) {
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

TEST_P(LeasePairTest, StandbyThatFellOutOfSyncDoesNotTakeOver) {
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

TEST_P(LeasePairTest, WorkerThatBreaksOffWhileTheServerGoesOnAloneComesBack) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Step(0);
  const uint64_t before = Shard(primary_).server_epoch();
  standby_.daemon.reset();
  Step(1);  // of the next epoch, which nobody has told the workers
  ASSERT_EQ(a_->Resume(primary_.address, 2, before).status(), absl::OkStatus());
  ASSERT_EQ(b_->Resume(primary_.address, 2, Shard(primary_).server_epoch()).status(), absl::OkStatus());
  Step(2);
  EXPECT_EQ(Status(primary_).version(), 3u);
}

TEST_P(LeasePairTest, StandbyInSyncTakesOverAlsoWhereAnotherOneWasLost) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Node third;
  third.directory = "three";
  third.follow = primary_.address;
  third.lease = service_->AddressOf("shard-0", service_->port());
  Start(third);
  const auto both = [this] {
    const v1::JobStatus status = Status(primary_);
    return status.followers_size() == 2 && status.followers(0).in_sync() && status.followers(1).in_sync();
  };
  ASSERT_TRUE(Eventually(both));
  Step(0);
  const uint64_t before = Shard(primary_).server_epoch();
  third.daemon.reset();
  Step(1);
  EXPECT_GT(Shard(primary_).server_epoch(), before);
  Step(2);
  TakeOver(3);  // it has been in sync all the time
}

TEST_P(LeasePairTest, StandbyThatIsBackBeforeItsLossIsAnnouncedTakesOver) {
  StartAll(Spec());
  if (HasFatalFailure()) return;
  Step(0);
  const uint64_t before = Shard(primary_).server_epoch();
  primary_way_->Cut();
  standby_.daemon.reset();
  Start(standby_);
  ASSERT_TRUE(Eventually([&] { return InSync(); }));
  primary_way_->Heal();
  if (!Eventually([&] { return Shard(primary_).server_epoch() > before; })) GTEST_SKIP() << "the lease had ended";
  Step(1);
  Step(2);
  TakeOver(3);  // it is in sync again
}

TEST_P(LeasePairTest, StandbyThatHasNotHeardOfAJobDoesNotTakeOver) {
  primary_.address = absl::StrCat("tcp://127.0.0.1:", FreePort());
  TcpProxy way(primary_.address);
  standby_.follow = way.address();
  Start(primary_);
  ASSERT_TRUE(Eventually([&] { return Serves(primary_); }));
  Start(standby_);
  usleep(1'500'000);  // it is told that all of no jobs are in sync
  way.Cut();
  StartWorkers(Spec());
  Step(0);
  a_.reset();
  b_.reset();
  primary_.daemon.reset();
  usleep(3'000'000);  // longer than the lease lives
  EXPECT_FALSE(Serves(standby_));
}

TEST_P(LeasePairTest, JobsThatCloseSlowlyHoldUpNeitherTheLeaseNorItsEnd) {
  Start(primary_);
  ASSERT_TRUE(Eventually([&] { return Serves(primary_); }));
  Start(standby_);
  const auto gate = std::make_shared<SlowGate>();
  const auto slow = SlowJobs(*primary_.daemon, primary_.address, gate);
  const absl::Cleanup opened = [&gate] { gate->Open(); };
  for (int look = 0; look < 40; ++look, usleep(100'000)) {
    ASSERT_TRUE(Serves(primary_)) << "twice as long as the lease lives";
    ASSERT_FALSE(Serves(standby_));
  }
  // It cannot renew: it stops before another one serves, whatever its jobs do.
  primary_way_->Cut();
  EXPECT_TRUE(Eventually([&] { return !Serves(primary_); }));
}

INSTANTIATE_TEST_SUITE_P(Every, LeasePairTest, testing::ValuesIn(LeaseServices()),
                         [](const auto& info) { return info.param == "kube-apiserver" ? "apiserver" : info.param; });

TEST(LeaseAddress, IsChecked) {
  EXPECT_TRUE(CheckLeaseAddress("etcd://etcd:2379/gradwire/shard-0").ok());
  for (const char* wrong : {"", "etcd://etcd:2379", "etcd://etcd:2379/", "etcd:///key", "zookeeper://a:1/b",
                            "etcd://etcd/key", "etcd://etcd:99999/key"}) {
    EXPECT_EQ(CheckLeaseAddress(wrong).code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace gradwire
