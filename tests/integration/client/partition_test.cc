// A worker behind a network that falls silent: its lease ends, the others go on, it says so itself and joins again when
// the network is back.
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

TEST(Partition, OthersGoOnAfterTheLeaseAndTheWorkerComesBack) {
  Cluster cluster(2, "grpc");
  TcpProxy proxies[] = {TcpProxy(cluster.addresses()[0]), TcpProxy(cluster.addresses()[1])};
  const std::vector<std::string> behind = {proxies[0].address(), proxies[1].address()};
  v1::JobSpec spec = MakeSpec("partition", "dense:values=fixed32", v1::OPTIMIZER_ADAMW, 2);
  spec.set_lease_ms(900);
  Worker near(spec, 0);
  Worker far(spec, 1);
  ASSERT_TRUE(near.Join(cluster.addresses()).ok());
  ASSERT_TRUE(far.Join(behind).ok());
  InParallel(2, [&](int w) {
    Worker& worker = w == 0 ? near : far;
    worker.Fill(0);
    const absl::Status status = worker.Step(0.01f);
    EXPECT_TRUE(status.ok()) << status;
  });
  const uint64_t version = near.session().version();
  ASSERT_EQ(far.session().version(), version);

  for (TcpProxy& proxy : proxies) proxy.Cut();
  absl::Status cut_off;
  std::thread waiting([&] {
    far.Fill(1);
    cut_off = far.Step(0.01f);
  });
  near.Fill(1);
  const absl::Status alone = near.Step(0.01f);  // ends with the other's lease
  EXPECT_TRUE(alone.ok()) << alone;
  EXPECT_EQ(near.session().version(), version + 1);
  for (uint32_t s = 0; s < 2; ++s) EXPECT_EQ(cluster.Workers(s, "partition"), 1);
  waiting.join();
  EXPECT_TRUE(absl::IsUnavailable(cut_off)) << cut_off;
  const std::string said(cut_off.message());  // of whichever shard was missed first
  EXPECT_TRUE(said.find(behind[0]) != std::string::npos || said.find(behind[1]) != std::string::npos) << cut_off;
  far.Drop();

  for (TcpProxy& proxy : proxies) proxy.Heal();
  std::string digest;
  std::atomic<uint64_t> target{UINT64_MAX};  // both stop at this version, some rounds after the return
  std::thread returning([&] {
    const absl::Status joined = far.Join(behind);
    EXPECT_TRUE(joined.ok()) << joined;
    target = joined.ok() ? far.session().start_version() + 5 : 0;
    while (joined.ok() && far.session().version() < target) {
      far.Fill(far.session().version());
      const absl::Status status = far.Step(0.01f);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return;
    }
    if (joined.ok()) digest = far.session().Digest();
  });
  while (near.session().version() < target) {
    near.Fill(near.session().version());
    const absl::Status status = near.Step(0.01f);
    EXPECT_TRUE(status.ok()) << status;
    if (!status.ok()) break;
  }
  returning.join();
  EXPECT_EQ(digest, near.session().Digest());
}

}  // namespace
}  // namespace gradwire::testing
