// A worker behind a network that falls silent, of a job that is in the servers' memory alone: its lease ends, the
// others go on, and it comes back when the network does, by itself or, where that took too long, by joining again.
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

class Partition : public ::testing::Test {
 protected:
  explicit Partition(v1::OptimizerKind optimizer = v1::OPTIMIZER_ADAMW, PullMode pull = PullMode::kUpdate)
      : pull_(pull), near_(Spec(optimizer), 0), far_(Spec(optimizer), 1) {}
  static v1::JobSpec Spec(v1::OptimizerKind optimizer) {
    v1::JobSpec spec = MakeSpec("partition", "dense:values=fixed32", optimizer, 2);
    spec.set_lease_ms(900);
    return spec;
  }
  // Both workers, and one step.
  void Start(int64_t reconnect_ms) {
    SessionOptions options = far_.Options(behind_, pull_);
    options.timeouts.reconnect_ms = reconnect_ms;
    ASSERT_TRUE(near_.Join(cluster_.addresses(), pull_).ok());
    ASSERT_TRUE(far_.JoinWith(std::move(options)).ok());
    InParallel(2, [&](int w) { Step(w == 0 ? near_ : far_); });
    ASSERT_EQ(far_.session().version(), near_.session().version());
  }
  static void Step(Worker& worker) {
    worker.Fill(worker.session().version());
    const absl::Status status = worker.Step(0.01f);
    EXPECT_TRUE(status.ok()) << status;
  }
  // One step of the near worker, which ends with the other's lease, beside one of the far worker; what became of that.
  void StepApart(std::thread* far, absl::Status* far_stepped) {
    const uint64_t version = near_.session().version();
    for (TcpProxy& proxy : proxies_) proxy.Cut();
    *far = std::thread([this, far_stepped] {
      far_.Fill(far_.session().version());
      *far_stepped = far_.Step(0.01f);
    });
    Step(near_);
    EXPECT_EQ(near_.session().version(), version + 1);
    for (uint32_t s = 0; s < 2; ++s) EXPECT_EQ(cluster_.Workers(s, "partition"), 1);
  }
  // The network is back when the near worker is two rounds ahead. `far` is at the first of them, as in StepApart.
  void FallBehind(std::thread* far, absl::Status* far_stepped) {
    Start(/*reconnect_ms=*/60'000);
    StepApart(far, far_stepped);
    Step(near_);
    Heal();
  }
  void Heal() {
    for (TcpProxy& proxy : proxies_) proxy.Heal();
  }
  // Until the far worker, which `come_back` brings back, has gone five steps more.
  void StepTogether(const std::function<bool()>& come_back) {
    std::string digest;
    std::atomic<uint64_t> target{UINT64_MAX};
    std::thread returning([&] {
      if (!come_back()) return void(target = 0);
      target = far_.session().version() + 5;
      while (far_.session().version() < target && !HasFailure()) Step(far_);
      digest = far_.session().Digest();
    });
    while (near_.session().version() < target && !HasFailure()) Step(near_);
    returning.join();
    EXPECT_EQ(digest, near_.session().Digest());
  }

  Cluster cluster_{2, "grpc"};
  TcpProxy proxies_[2] = {TcpProxy(cluster_.addresses()[0]), TcpProxy(cluster_.addresses()[1])};
  const std::vector<std::string> behind_ = {proxies_[0].address(), proxies_[1].address()};
  const PullMode pull_;
  Worker near_, far_;
};

class PartitionOfMeans : public Partition {
 protected:
  PartitionOfMeans() : Partition(v1::OPTIMIZER_NONE, PullMode::kMean) {}
};

TEST_F(Partition, OthersGoOnAfterTheLeaseAndTheWorkerJoinsAgain) {
  Start(/*reconnect_ms=*/500);
  std::thread far;
  absl::Status cut_off;
  StepApart(&far, &cut_off);
  far.join();
  EXPECT_TRUE(absl::IsUnavailable(cut_off)) << cut_off;
  const std::string said(cut_off.message());  // of whichever shard was missed first
  EXPECT_TRUE(said.find(behind_[0]) != std::string::npos || said.find(behind_[1]) != std::string::npos) << cut_off;
  far_.Drop();
  Heal();
  StepTogether([this] {
    const absl::Status joined = far_.Join(behind_);
    EXPECT_TRUE(joined.ok()) << joined;
    return joined.ok();
  });
}

TEST_F(Partition, TheWorkerComesBackByItselfWhereTheNetworkIsBackInTime) {
  std::thread far;
  absl::Status stepped = absl::UnknownError("it has not ended");
  FallBehind(&far, &stepped);
  StepTogether([&] {
    far.join();
    EXPECT_TRUE(stepped.ok()) << stepped;
    EXPECT_GE(far_.session().stats().skipped_rounds, 1u);
    return stepped.ok();
  });
}

TEST_F(PartitionOfMeans, WhoComesBackRoundsBehindIsInTheMeansAgain) {
  std::thread far;
  absl::Status stepped = absl::UnknownError("it has not ended");
  FallBehind(&far, &stepped);
  far.join();
  ASSERT_TRUE(stepped.ok()) << stepped;
  const uint64_t target = near_.session().version() + 5;
  const auto step_until = [this](uint64_t version) {
    InParallel(2, [&](int w) {
      Worker& worker = w == 0 ? near_ : far_;
      while (worker.session().version() < version && !HasFailure()) Step(worker);
    });
  };
  step_until(target);
  const uint64_t left_out = far_.session().stats().not_included_frames;
  step_until(target + 1);
  EXPECT_EQ(far_.session().stats().not_included_frames, left_out);
  EXPECT_EQ(near_.parameters(), far_.parameters());
}

}  // namespace
}  // namespace gradwire::testing
