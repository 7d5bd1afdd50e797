// After many rounds every replica and every shard hold the same bits, whatever the arrival order and the transport, and
// whatever the number of shards unless elements were deferred: which ones a sketch cannot decode depends on the slices
// it is made of.
#include <algorithm>
#include <random>
#include <set>

#include "client/cpp/internal/exchange.h"
#include "tests/integration/client/cluster.h"

namespace gradwire::testing {
namespace {

struct Case {
  std::string name;
  std::string codec;
  v1::OptimizerKind optimizer;
  bool defers = false;  // the sketches are too small on purpose
  bool small = false;
};

std::string NameOf(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

class DigestTest : public ::testing::TestWithParam<Case> {};

// Runs `rounds` steps of `workers` workers; returns the digests of all replicas, checked against the shards.
std::set<std::string> Train(const Case& c, const std::string& job, Cluster& cluster, int workers, int rounds,
                            uint64_t* deferred_elements = nullptr) {
  std::atomic<uint64_t> deferred{0};
  const v1::JobSpec large = MakeSpec(job, c.codec, c.optimizer, workers);
  const v1::JobSpec spec = c.small ? Small(large) : large;
  EXPECT_EQ(Job::Make(spec)->elements() > client::Exchange::kThreadsAbove, !c.small);
  std::vector<std::string> digests(workers);
  std::vector<std::vector<std::string>> shard_digests(workers);
  InParallel(workers, [&](int w) {
    Worker worker(spec, w);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    const std::string first = worker.session().Digest();
    for (int round = 0; round < rounds; ++round) {
      worker.Fill(static_cast<uint64_t>(round));
      const absl::Status status = worker.Step(0.01f / static_cast<float>(1 + round / 10));
      ASSERT_TRUE(status.ok()) << status;
    }
    digests[w] = worker.session().Digest();
    shard_digests[w] = worker.session().ShardDigests();
    EXPECT_NE(digests[w], first) << "nothing was learnt";
    EXPECT_EQ(worker.session().version(), static_cast<uint64_t>(rounds) + 1);
    EXPECT_EQ(worker.session().stats().steps, static_cast<uint64_t>(rounds));
    deferred += worker.session().stats().deferred_elements;
  });
  for (int w = 0; w < workers; ++w)
    for (uint32_t s = 0; s < shard_digests[w].size(); ++s)
      EXPECT_EQ(shard_digests[w][s], cluster.ParametersSha256(s, job)) << "worker " << w << " shard " << s;
  if (deferred_elements != nullptr) *deferred_elements += deferred;
  return {digests.begin(), digests.end()};
}

TEST_P(DigestTest, AgreesAcrossShardsTransportsAndArrivalOrders) {
  std::set<std::string> all;
  uint64_t deferred = 0;
  for (uint32_t shards : {1u, 2u, 4u}) {
    std::set<std::string> digests;
    for (const std::string scheme : {"inproc", "grpc"}) {
      Cluster cluster(shards, scheme);
      digests.merge(Train(GetParam(), absl::StrCat("digest-", shards), cluster, 2, 100, &deferred));
    }
    EXPECT_EQ(digests.size(), 1u) << shards << " shards: replicas differ, or transports do";
    all.merge(digests);
  }
  if (GetParam().defers) {
    EXPECT_GT(deferred, 0u);
  } else {
    EXPECT_EQ(deferred, 0u);
    EXPECT_EQ(all.size(), 1u) << "the number of shards changed the result";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, DigestTest,
    ::testing::Values(Case{"AdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW},
                      Case{"AdamWFixed32", "dense:values=fixed32", v1::OPTIMIZER_ADAMW},
                      Case{"AdamWTagc", "tagc:density=0.05,slack=4", v1::OPTIMIZER_ADAMW},
                      Case{"StepTagc", "tagc:density=0.05,slack=8", v1::OPTIMIZER_STEP},
                      Case{"StepTagcOverloaded", "tagc:density=0.05,slack=0.7", v1::OPTIMIZER_STEP, true},
                      Case{"SmallAdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW, false, true},
                      Case{"SmallStepTagcOverloaded", "tagc:density=0.05,slack=0.7", v1::OPTIMIZER_STEP, true, true}),
    NameOf);

TEST(TwoJobs, DoNotDisturbEachOther) {
  const Case dense{"dense", "dense:values=fixed32", v1::OPTIMIZER_ADAMW};
  const Case sparse{"sparse", "tagc:density=0.05", v1::OPTIMIZER_STEP};
  Cluster alone(2, "inproc");
  const std::set<std::string> dense_alone = Train(dense, "one", alone, 2, 30);
  const std::set<std::string> sparse_alone = Train(sparse, "two", alone, 2, 30);
  Cluster shared(2, "inproc");
  std::set<std::string> dense_shared;
  std::set<std::string> sparse_shared;
  InParallel(2, [&](int job) {
    if (job == 0)
      dense_shared = Train(dense, "one", shared, 2, 30);
    else
      sparse_shared = Train(sparse, "two", shared, 2, 30);
  });
  EXPECT_EQ(dense_alone, dense_shared);
  EXPECT_EQ(sparse_alone, sparse_shared);
}

}  // namespace
}  // namespace gradwire::testing
