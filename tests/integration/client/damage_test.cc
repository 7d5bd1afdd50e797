// Networks that flip bits, anywhere in what is sent either way: nobody takes a damaged byte for a good one, nobody
// waits for what cannot come, and the job has the bits that it has without.
#include <chrono>

#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

constexpr int kWorkers = 2;
constexpr int kRounds = 24;

struct Case {
  std::string scheme;
  size_t gap_bytes;  // between flips, in the mean
};

class Damage : public ::testing::TestWithParam<Case> {
 protected:
  static v1::JobSpec Spec(const std::string& name) {
    v1::JobSpec spec = MakeSpec(name, "dense:values=fixed32", v1::OPTIMIZER_ADAMW, kWorkers);
    spec.set_lease_ms(60'000);  // no round closes without a worker
    return spec;
  }
  // The digest after kRounds, of both workers.
  static std::string Train(const std::string& name, const std::vector<std::string>& servers) {
    std::vector<std::string> digests(kWorkers);
    InParallel(kWorkers, [&](int w) {
      Worker worker(Spec(name), w);
      SessionOptions options = worker.Options(servers);
      options.round_timeout_ms = options.start_timeout_ms = 300'000;
      options.connect_timeout_ms = options.reconnect_timeout_ms = 120'000;
      const absl::Status joined = worker.JoinWith(std::move(options));
      ASSERT_TRUE(joined.ok()) << joined;
      for (uint64_t step = 0; step < kRounds; ++step) {
        worker.Fill(step);
        const absl::Status stepped = worker.Step(0.01f);
        ASSERT_TRUE(stepped.ok()) << "step " << step << ": " << stepped;
      }
      digests[w] = worker.session().Digest();
    });
    EXPECT_EQ(digests[0], digests[1]);
    return digests[0];
  }
};

TEST_P(Damage, ChangesNoBitOfTheJob) {
  Cluster cluster(1, GetParam().scheme);
  const std::string expected = Train("calm", cluster.addresses());
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    TcpProxy proxy(cluster.addresses()[0]);
    proxy.FlipBits(GetParam().gap_bytes, seed);
    EXPECT_EQ(Train(absl::StrCat("damaged-", seed), {proxy.address()}), expected) << "seed " << seed;
    EXPECT_GE(proxy.flips(), 4u) << "the test tests nothing";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Damage, ::testing::Values(Case{"tcp", 400'000}, Case{"grpc", 600'000}),
                         [](const auto& info) { return info.param.scheme; });

}  // namespace
}  // namespace gradwire::testing
