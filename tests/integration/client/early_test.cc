// Updates that are applied while a round is open, and jobs whose buckets have their default size.
#include <gmock/gmock.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

struct EarlyCase {
  std::string name;
  std::string codec;
  v1::OptimizerKind optimizer = v1::OPTIMIZER_ADAMW;
  PullMode pull = PullMode::kUpdate;
  uint32_t staleness = 0;
};

class EarlyUpdates : public ::testing::TestWithParam<EarlyCase> {
 protected:
  // Digest of every shard's part of every worker's parameters, after some steps.
  static std::set<std::vector<std::string>> Train(bool early) {
    constexpr int kWorkers = 2, kSteps = 12;
    const EarlyCase& c = GetParam();
    Cluster cluster(2, "tcp");
    v1::JobSpec spec = MakeSpec("early", c.codec, c.optimizer, kWorkers);
    if (c.staleness > 0) {
      spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
      spec.mutable_rounds()->set_staleness(c.staleness);
    }
    std::vector<std::vector<std::string>> digests(kWorkers);
    InParallel(kWorkers, [&](int w) {
      Worker worker(spec, w);
      SessionOptions options = worker.Options(cluster.addresses(), c.pull);
      options.early_updates = early;
      ASSERT_EQ(worker.JoinWith(std::move(options)), absl::OkStatus());
      for (uint64_t step = 0; step < kSteps; ++step) {
        // Parameters are a version ahead of each other with staleness: no gradient may depend on them.
        c.staleness > 0 ? worker.FillApart(step) : worker.Fill(step);
        ASSERT_EQ(worker.Step(FallingRate(step)), absl::OkStatus());
      }
      ASSERT_EQ(worker.session().Drain(), absl::OkStatus());
      digests[static_cast<size_t>(w)] = worker.session().ShardDigests();
    });
    return {digests.begin(), digests.end()};
  }
};

INSTANTIATE_TEST_SUITE_P(
    Jobs, EarlyUpdates,
    ::testing::Values(EarlyCase{"dense", "dense:values=fixed32"},
                      EarlyCase{"steps", "tagc:density=0.05", v1::OPTIMIZER_STEP},
                      EarlyCase{"sketches", "tagc:density=0.05,form=sketch", v1::OPTIMIZER_STEP},
                      EarlyCase{"topk", "topk:density=0.05,values=int8"},
                      EarlyCase{"parameters", "topk:density=0.05", v1::OPTIMIZER_ADAMW, PullMode::kParams},
                      EarlyCase{"norms", "dense:values=fixed32", v1::OPTIMIZER_LAMB},
                      EarlyCase{"bounded", "dense:values=fixed32", v1::OPTIMIZER_SGD, PullMode::kUpdate, 2}),
    [](const auto& info) { return info.param.name; });

TEST_P(EarlyUpdates, GiveTheBitsOfLateOnes) {
  const auto late = Train(false);
  EXPECT_EQ(late.size(), 1u) << "workers differ";
  EXPECT_EQ(Train(true), late);
}

TEST(EarlyUpdatesOf, ASessionThatHasFailedAreNotApplied) {
  Cluster cluster(2, "tcp");
  TcpProxy proxy(cluster.addresses()[1]);
  v1::JobSpec spec = MakeSpec("failed", "dense:values=fixed32", v1::OPTIMIZER_SGD, 2);
  spec.set_lease_ms(3000);  // signs of life come three times as often
  Worker far(spec, 0), near(spec, 1);
  SessionOptions options = far.Options({cluster.addresses()[0], proxy.address()});
  options.early_updates = true;
  options.timeouts.connect_ms = 1000;
  options.timeouts.reconnect_ms = 300;
  options.timeouts.rpc_ms = 300;
  ASSERT_EQ(far.JoinWith(std::move(options)), absl::OkStatus());
  ASSERT_EQ(near.Join(cluster.addresses()), absl::OkStatus());
  InParallel(2, [&](int w) {
    Worker& worker = w == 0 ? far : near;
    worker.FillApart(0);
    ASSERT_EQ(worker.Step(0.1f), absl::OkStatus());
  });

  // All but a tensor is sent to the shard that stays, and waits there for the other worker.
  const auto last = static_cast<uint32_t>(far.gradients().size() - 1);
  ASSERT_EQ(far.session().BeginRound({{0.1f}}), absl::OkStatus());
  for (uint32_t t = 0; t < last; ++t)
    ASSERT_EQ(far.session().TensorReady(t, far.gradients()[t].data()), absl::OkStatus());
  const auto frames = [&] { return cluster.Describe(0, "failed").push_bytes(); };
  for (uint64_t before = 0; before != frames();) {
    before = frames();
    absl::SleepFor(absl::Milliseconds(100));
  }
  proxy.Cut();
  absl::Status failed;
  for (const absl::Time hangs = absl::Now() + absl::Seconds(60); failed.ok() && absl::Now() < hangs;) {
    failed = far.session().BeginRound({{0.1f}});
    if (absl::IsFailedPrecondition(failed)) failed = absl::OkStatus();  // a round is open, no more
    absl::SleepFor(absl::Milliseconds(10));
  }
  ASSERT_TRUE(absl::IsUnavailable(failed)) << failed;
  EXPECT_EQ(far.session().TensorReady(last, far.gradients()[last].data()), failed);
  const auto then = far.parameters();
  ASSERT_EQ(near.session().BeginRound({{0.1f}}), absl::OkStatus());
  for (uint32_t t = 0; t < last; ++t)
    ASSERT_EQ(near.session().TensorReady(t, near.gradients()[t].data()), absl::OkStatus());
  absl::SleepFor(absl::Milliseconds(500));  // updates of the shard that stays come meanwhile
  EXPECT_EQ(far.parameters(), then);
}

TEST(EarlyUpdatesOf, AsynchronousRoundsAreRefused) {
  Cluster cluster(1, "inproc");
  v1::JobSpec spec = MakeSpec("async", "dense:values=fixed32", v1::OPTIMIZER_SGD, 1);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  Worker worker(spec, 0);
  SessionOptions options = worker.Options(cluster.addresses(), PullMode::kParams);
  options.early_updates = true;
  const absl::Status joined = worker.JoinWith(std::move(options));
  EXPECT_TRUE(absl::IsInvalidArgument(joined)) << joined;
  EXPECT_THAT(joined.message(), ::testing::HasSubstr("early_updates"));
}

// Buckets and slices that a spec leaves open are the same for whoever fills them in.
TEST(DefaultBuckets, OfAJobThatServersMadeAreThoseOfItsWorkers) {
  constexpr uint32_t kShards = 6;
  Cluster cluster(kShards, "tcp");
  v1::JobSpec spec = MakeSpec("bare", "tagc:density=0.05", v1::OPTIMIZER_STEP, 1);
  spec.clear_bucket_bytes();
  spec.clear_slice_bytes();
  for (uint32_t s = 0; s < kShards; ++s) cluster.Create(spec, s, kShards);
  Worker worker(spec, 0);
  ASSERT_EQ(worker.Join(cluster.addresses()), absl::OkStatus());
  worker.Fill(0);
  EXPECT_EQ(worker.Step(0.1f), absl::OkStatus());
  for (uint32_t s = 0; s < kShards; ++s) {
    auto again = cluster.Create(spec, s, kShards);
    ASSERT_NE(again, nullptr) << "the same spec is the same job";
  }
}

TEST(DefaultBuckets, OnOtherNumbersOfShardsLoseNothingOfACheckpoint) {
  Cluster many(6, "tcp"), few(2, "tcp");
  v1::JobSpec spec = MakeSpec("before", "tagc:density=0.05", v1::OPTIMIZER_STEP, 1);
  spec.clear_bucket_bytes();
  spec.clear_slice_bytes();
  Worker before(spec, 0);
  ASSERT_EQ(before.Join(many.addresses()), absl::OkStatus());
  before.Fill(0);
  ASSERT_EQ(before.Step(0.1f), absl::OkStatus());
  const testing_support::TemporaryFolder folder("buckets");
  const std::string path = folder.path() + "/checkpoint";
  ASSERT_EQ(before.session().Save(path), absl::OkStatus());

  spec.set_name("after");
  Worker after(spec, 0);
  SessionOptions options = after.Options(few.addresses());
  options.resume = {path, /*anew=*/true};
  std::vector<std::string> told;
  absl::Mutex mu;
  options.notice = [&](const std::string& text) {
    absl::MutexLock lock(&mu);
    told.push_back(text);
  };
  ASSERT_EQ(after.JoinWith(std::move(options)), absl::OkStatus());
  EXPECT_EQ(after.parameters(), before.parameters());
  after.Drop();
  EXPECT_THAT(told, ::testing::Contains(::testing::HasSubstr("with this worker's residuals and preconditioner")));
}

}  // namespace
}  // namespace gradwire::testing
