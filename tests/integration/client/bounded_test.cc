// Bounded staleness: rounds merge what synchronous ones would, workers run ahead of each other by as many rounds as the
// job allows and no more, and nothing that was pushed is lost.
#include <algorithm>
#include <random>
#include <set>
#include <thread>

#include "absl/time/clock.h"
#include "tests/integration/client/applied.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

v1::JobSpec Bounded(v1::JobSpec spec, uint32_t staleness) {
  if (staleness == 0) return spec;
  spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  spec.mutable_rounds()->set_staleness(staleness);
  return spec;
}

// Gradients that do not depend on the parameters, on a grid on which every codec is exact; every run has the same range
// in every round.
void FillOnGrid(Worker& worker, int index, uint64_t step) {
  std::mt19937 random(static_cast<uint32_t>(step * 131 + static_cast<uint64_t>(index)));
  for (auto& gradient : worker.gradients()) {
    for (float& x : gradient) {
      const float magnitude = static_cast<float>(33 + random() % 32) / 64;
      x = random() % 2 == 0 ? magnitude : -magnitude;
    }
  }
}

struct BoundedCase {
  std::string name;
  std::string codec;
  v1::OptimizerKind optimizer;
  PullMode pull = PullMode::kUpdate;
  bool small = false;
};

// The digests of all replicas, checked against the shards. Workers sleep at random, so frames arrive in any order.
std::set<std::string> TrainBounded(const BoundedCase& c, uint32_t staleness, uint32_t shards, const std::string& scheme,
                                   int workers, uint64_t steps) {
  Cluster cluster(shards, scheme);
  v1::JobSpec spec = Bounded(MakeSpec("bounded", c.codec, c.optimizer, static_cast<uint32_t>(workers)), staleness);
  if (c.small) spec = Small(std::move(spec));
  std::vector<std::string> digests(workers);
  InParallel(workers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(cluster.addresses(), c.pull);
    ASSERT_TRUE(joined.ok()) << joined;
    std::mt19937 random(static_cast<uint32_t>(w) + 77 * staleness);
    for (uint64_t step = 0; step < steps; ++step) {
      FillOnGrid(worker, w, step);
      if (random() % 8 == 0) absl::SleepFor(absl::Milliseconds(random() % 8));
      const absl::Status status = worker.Step(FallingRate(step));
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_GE(worker.session().version() + staleness, step + 2) << "round 0 calibrates";
    }
    const absl::Status drained = worker.session().Drain();
    ASSERT_TRUE(drained.ok()) << drained;
    EXPECT_EQ(worker.session().version(), steps + 1);
    EXPECT_EQ(worker.session().stats().steps, steps);
    EXPECT_EQ(worker.session().stats().not_included_frames, 0u);
    EXPECT_EQ(worker.session().stats().skipped_rounds, 0u);
    digests[w] = worker.session().Digest();
    for (uint32_t s = 0; s < shards; ++s) {
      EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, "bounded")) << "worker " << w;
    }
    EXPECT_TRUE(worker.session().Leave().ok());
  });
  return {digests.begin(), digests.end()};
}

class SameAsSync : public ::testing::TestWithParam<BoundedCase> {};

TEST_P(SameAsSync, WhereFramesAreTheSame) {
  const std::set<std::string> sync = TrainBounded(GetParam(), 0, 2, "inproc", 3, 40);
  ASSERT_EQ(sync.size(), 1u);
  for (const uint32_t staleness : {1u, 2u, 4u}) {
    for (const uint32_t shards : {1u, 2u, 4u}) {
      const std::string scheme = shards == 2 ? "grpc" : "inproc";
      EXPECT_EQ(TrainBounded(GetParam(), staleness, shards, scheme, 3, 40), sync)
          << "staleness " << staleness << ", " << shards << " shards";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, SameAsSync,
    ::testing::Values(BoundedCase{"AdamWFp32", "dense:values=fp32", v1::OPTIMIZER_ADAMW},
                      BoundedCase{"SgdFixed16", "dense:values=fixed16", v1::OPTIMIZER_SGD},
                      BoundedCase{"SmallStepFp32", "dense:values=fp32", v1::OPTIMIZER_STEP, PullMode::kUpdate, true},
                      BoundedCase{"AdamWFp32Params", "dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kParams}),
    [](const auto& info) { return info.param.name; });

class ReplicasAgree : public ::testing::TestWithParam<BoundedCase> {};

// Sparse codecs choose by the residual, which what is deferred comes back to when it comes.
TEST_P(ReplicasAgree, WhateverTheOrder) {
  for (const uint32_t staleness : {1u, 2u, 4u}) {
    for (const uint32_t shards : {1u, 2u, 4u}) {
      EXPECT_EQ(TrainBounded(GetParam(), staleness, shards, "inproc", 3, 40).size(), 1u)
          << "staleness " << staleness << ", " << shards << " shards";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, ReplicasAgree,
    ::testing::Values(BoundedCase{"AdamWTagc", "tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_ADAMW},
                      BoundedCase{"StepTagcOverloaded", "tagc:density=0.05,form=sketch,slack=0.7", v1::OPTIMIZER_STEP},
                      BoundedCase{"SmallTagcParams", "tagc:density=0.05", v1::OPTIMIZER_SGD, PullMode::kParams, true}),
    [](const auto& info) { return info.param.name; });

// A worker that does nothing holds up nobody within the window, and everybody behind it.
TEST(BoundedStaleness, TheFastestIsAtMostSoManyRoundsAhead) {
  for (const bool small : {false, true}) {
    for (const uint32_t staleness : {1u, 3u}) {
      SCOPED_TRACE(absl::StrCat("staleness ", staleness, small ? " small" : ""));
      Cluster cluster(2, "inproc");
      v1::JobSpec spec = Bounded(MakeSpec("ahead", "tagc:density=0.1", v1::OPTIMIZER_SGD, 2), staleness);
      if (small) spec = Small(std::move(spec));
      spec.set_lease_ms(60'000);
      Worker fast(spec, 0), slow(spec, 1);
      InParallel(2, [&](int w) {
        Worker& worker = w == 0 ? fast : slow;
        ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
        FillOnGrid(worker, w, 0);
        ASSERT_TRUE(worker.Step(0.01f).ok());  // rounds 0 and 1
        ASSERT_TRUE(worker.session().Drain().ok());
      });
      for (uint32_t i = 1; i <= staleness; ++i) {
        FillOnGrid(fast, 0, i);
        ASSERT_TRUE(fast.Step(0.01f).ok()) << i;
        EXPECT_EQ(fast.session().version(), 2u) << "nothing of the slow one's is merged, or comes without it";
      }
      const std::vector<float> rates = {0.01f};
      ASSERT_TRUE(fast.session().BeginRound(rates).ok());
      for (uint32_t t = 0; t < fast.gradients().size(); ++t) {
        ASSERT_TRUE(fast.session().TensorReady(t, fast.gradients()[t].data()).ok());
      }
      EXPECT_TRUE(absl::IsDeadlineExceeded(fast.session().EndRound(50)));
      FillOnGrid(slow, 1, 1);
      ASSERT_TRUE(slow.Step(0.01f).ok());
      ASSERT_TRUE(fast.session().EndRound().ok());
      EXPECT_EQ(fast.session().version(), 3u);
      // The slow one goes on as if it were alone, up to where the fast one is.
      for (uint32_t i = 0; i < staleness; ++i) ASSERT_TRUE(slow.Step(0.01f).ok());
      ASSERT_TRUE(fast.session().Drain().ok());
      ASSERT_TRUE(slow.session().Drain().ok());
      EXPECT_EQ(fast.session().version(), 3u + staleness);
      EXPECT_EQ(fast.session().Digest(), slow.session().Digest());
    }
  }
}

// Sketches that are too small on purpose defer elements of rounds behind which others are on their way already.
TEST(BoundedStaleness, WhatWasPushedIsAppliedOrInTheResidual) {
  for (const std::string codec : {"tagc:density=0.2,form=sketch,slack=0.7", "dense:values=fixed32"}) {
    SCOPED_TRACE(codec);
    constexpr int kWorkers = 3;
    Cluster cluster(2, "inproc");
    const v1::JobSpec spec = Bounded(Small(MakeSpec("conserved", codec, v1::OPTIMIZER_SGD, kWorkers)), 2);
    Applied applied(spec, 2);
    for (uint32_t s = 0; s < 2; ++s) cluster.Create(spec, s, 2)->log().SetSink(applied.SinkOf(s));
    std::vector<std::vector<std::vector<double>>> pushed(kWorkers);
    std::atomic<uint64_t> deferred{0};
    InParallel(kWorkers, [&](int w) {
      Worker worker(spec, w);
      ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
      std::mt19937 random(static_cast<uint32_t>(w));
      for (const auto& gradient : worker.gradients()) pushed[w].emplace_back(gradient.size());
      for (int step = 0; step < 120; ++step) {  // zeros at last, until everything that waits has left
        for (size_t t = 0; t < worker.gradients().size(); ++t) {
          for (size_t i = 0; i < worker.gradients()[t].size(); ++i) {
            const float value = step >= 30 ? 0.0f : static_cast<float>(static_cast<int>(random() % 129) - 64) / 64;
            worker.gradients()[t][i] = value;
            pushed[w][t][i] += value;
          }
        }
        if (random() % 8 == 0) absl::SleepFor(absl::Milliseconds(random() % 8));
        const absl::Status status = worker.Step(1e-4f);
        ASSERT_TRUE(status.ok()) << status;
      }
      ASSERT_TRUE(worker.session().Drain().ok());
      deferred += worker.session().stats().deferred_elements;
    });
    if (codec.starts_with("tagc")) {
      EXPECT_GT(deferred, 0u);
    }
    const auto& sums = applied.Sum();
    for (size_t t = 0; t < sums.size(); ++t) {
      for (size_t i = 0; i < sums[t].size(); ++i) {
        double expected = 0;
        for (int w = 0; w < kWorkers; ++w) expected += pushed[w][t][i];
        ASSERT_EQ(sums[t][i], expected) << "tensor " << t << " element " << i;
      }
    }
  }
}

TEST(BoundedStaleness, ANewcomerJoinsInTheMiddle) {
  for (const std::string codec : {"tagc:density=0.1", "dense:values=fixed16"}) {
    SCOPED_TRACE(codec);
    constexpr uint64_t kEnd = 60;  // every worker pushes the rounds before it
    Cluster cluster(2, "inproc");
    v1::JobSpec spec = Bounded(MakeSpec("newcomer", codec, v1::OPTIMIZER_ADAMW, 2), 3);
    spec.set_max_workers(3);
    std::atomic<uint64_t> reached{0};
    std::vector<std::string> digests(3);
    InParallel(3, [&](int w) {
      Worker worker(spec, w);
      while (w == 2 && reached < 10) absl::SleepFor(absl::Milliseconds(1));
      const absl::Status joined = worker.Join(cluster.addresses());
      ASSERT_TRUE(joined.ok()) << joined;
      const uint64_t first = std::max<uint64_t>(worker.session().start_version(), 1);  // round 0 is no step
      if (w == 2) {
        EXPECT_GT(first, 1u);
      }
      for (uint64_t round = first; round < kEnd; ++round) {
        worker.Fill(round);
        const absl::Status status = worker.Step(0.01f);
        ASSERT_TRUE(status.ok()) << status;
        if (w == 0) reached = round;
        if (w == 0 && round < 20) absl::SleepFor(absl::Milliseconds(5));
      }
      ASSERT_TRUE(worker.session().Drain().ok());
      EXPECT_EQ(worker.session().version(), kEnd);
      digests[w] = worker.session().Digest();
    });
    EXPECT_EQ(digests[0], digests[1]);
    EXPECT_EQ(digests[0], digests[2]);
  }
}

// It comes back with several rounds unanswered: none of them is merged, all of them return to its residual.
TEST(BoundedStaleness, AWorkerThatWasAwayBeyondItsLeaseReturns) {
  for (const PullMode pull : {PullMode::kUpdate, PullMode::kParams}) {
    SCOPED_TRACE(pull == PullMode::kUpdate ? "update" : "params");
    Cluster cluster(2, "grpc");
    testing_support::TcpProxy proxies[] = {testing_support::TcpProxy(cluster.addresses()[0]),
                                           testing_support::TcpProxy(cluster.addresses()[1])};
    v1::JobSpec spec = Bounded(MakeSpec("away", "tagc:density=0.2", v1::OPTIMIZER_ADAMW, 2), 2);
    spec.set_lease_ms(900);
    Worker near(spec, 0), far(spec, 1);
    ASSERT_TRUE(near.Join(cluster.addresses(), pull).ok());
    ASSERT_TRUE(far.Join({proxies[0].address(), proxies[1].address()}, pull).ok());
    const auto run = [](Worker& worker, uint64_t round) {
      worker.Fill(round);
      const absl::Status status = worker.Step(0.01f);
      EXPECT_TRUE(status.ok()) << status;
      return status.ok();
    };
    InParallel(2, [&](int w) {
      Worker& worker = w == 0 ? near : far;
      EXPECT_TRUE(run(worker, 1));
      EXPECT_TRUE(worker.session().Drain().ok());
    });
    for (auto& proxy : proxies) proxy.Cut();
    std::atomic<uint64_t> target{UINT64_MAX};  // the round before which both stop
    std::thread waiting([&] {
      uint64_t rounds = 0;
      while (far.session().stats().skipped_rounds == 0 && run(far, 100 + rounds)) ++rounds;
      EXPECT_GE(rounds, 3u) << "two went out before it noticed";
      target = far.session().version() + 8;
      for (int i = 0; i < 8; ++i) EXPECT_TRUE(run(far, 200 + static_cast<uint64_t>(i)));
      EXPECT_TRUE(far.session().Drain().ok());
    });
    uint64_t next = 2;
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(run(near, next++));  // the third waits until the other's lease has ended
    for (auto& proxy : proxies) proxy.Heal();
    while (next < target && run(near, next)) ++next;
    EXPECT_TRUE(near.session().Drain().ok());
    waiting.join();
    EXPECT_EQ(near.session().version(), target);
    EXPECT_EQ(far.session().version(), target);
    EXPECT_GT(far.session().stats().not_included_frames, 0u);
    EXPECT_EQ(far.session().Digest(), near.session().Digest());
    for (uint32_t s = 0; s < 2; ++s)
      EXPECT_EQ(far.session().ShardDigests()[s], cluster.ParametersSha256(s, "away")) << "shard " << s;
  }
}

// The shard has made all versions that it has pushed to, and has the parameters of the last one only: it has to catch
// up with the very version that it knows to be the next.
TEST(BoundedStaleness, AWorkerWhoseParametersWereReplacedWhileItsConnectionWasLostGoesOn) {
  Cluster cluster(2, "grpc");
  auto proxy = std::make_unique<testing_support::TcpProxy>(cluster.addresses()[1]);
  v1::JobSpec spec = Bounded(MakeSpec("replaced", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 2), 4);
  spec.set_lease_ms(120'000);
  Worker near(spec, 0), far(spec, 1);
  const auto run = [](Worker& worker, uint64_t round) {
    worker.Fill(round);
    const absl::Status status = worker.Step(0.01f);
    EXPECT_TRUE(status.ok()) << status;
  };
  InParallel(2, [&](int w) {
    std::vector<std::string> addresses = cluster.addresses();
    if (w == 1) addresses[1] = absl::StrCat(proxy->address(), "|", addresses[1]);
    ASSERT_TRUE((w == 0 ? near : far).Join(addresses, PullMode::kParams).ok());
    run(w == 0 ? near : far, 1);
    EXPECT_TRUE((w == 0 ? near : far).session().Drain().ok());
  });
  const auto frames = [&cluster] {
    uint64_t sum = 0;
    const v1::JobStatus status = cluster.Describe(1, "replaced");
    for (const v1::WorkerStatus& worker : status.workers()) sum += worker.frames();
    return sum;
  };
  const uint64_t all = frames() + frames() / 2;  // two rounds of two workers, then two of one
  for (const uint64_t round : {2, 3}) run(far, round);
  while (frames() < all) absl::SleepFor(absl::Milliseconds(1));
  proxy->Cut();
  for (const uint64_t round : {2, 3}) run(near, round);
  ASSERT_EQ(near.session().Drain(), absl::OkStatus());
  const std::string digest = near.session().Digest();
  ASSERT_EQ(near.session().Leave(),
            absl::OkStatus());  // who comes back later begins with a round that nobody is in yet
  proxy.reset();
  ASSERT_EQ(far.session().Drain(60'000), absl::OkStatus());
  EXPECT_EQ(far.session().version(), 4u);
  EXPECT_EQ(far.session().Digest(), digest);
}

TEST(BoundedStaleness, ACheckpointIsTakenWhenEverythingIsSettled) {
  Cluster cluster(1, "inproc");
  const v1::JobSpec spec = Bounded(MakeSpec("checkpoint", "tagc:density=0.1", v1::OPTIMIZER_ADAMW, 1), 4);
  const std::string path = ::testing::TempDir() + "/bounded-checkpoint";
  std::string digest;
  {
    Worker worker(spec, 0);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    for (uint64_t step = 0; step < 10; ++step) {
      worker.Fill(step);
      ASSERT_TRUE(worker.Step(0.01f).ok());
    }
    ASSERT_EQ(worker.session().Save(path), absl::OkStatus());
    EXPECT_EQ(worker.session().version(), 11u);
    digest = worker.session().Digest();
  }
  Worker again(spec, 0);
  SessionOptions options = again.Options(cluster.addresses());
  options.resume.from = path;
  auto session = Session::Join(std::move(options));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->resumed());
  EXPECT_GE((*session)->version(), 11u);
  EXPECT_EQ((*session)->Digest(), digest);
}

TEST(BoundedStaleness, IsRefusedWhereItCannotBe) {
  const auto refused = [](v1::JobSpec spec) { return std::string(Job::Make(spec).status().message()); };
  const v1::JobSpec spec = MakeSpec("refused", "dense:values=fp32", v1::OPTIMIZER_SGD, 2);
  EXPECT_TRUE(Job::Make(Bounded(spec, 16)).ok());
  EXPECT_NE(refused(Bounded(spec, 17)).find("[1, 16]"), std::string::npos);
  v1::JobSpec none = spec;
  none.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  EXPECT_NE(refused(none).find("staleness = 0"), std::string::npos);
  v1::JobSpec quorum = Bounded(spec, 2);
  quorum.mutable_rounds()->set_quorum(1);
  EXPECT_NE(refused(quorum).find("rounds.quorum"), std::string::npos);
  EXPECT_NE(refused(Bounded(MakeSpec("mean", "dense:values=fp32", v1::OPTIMIZER_NONE, 2), 2)).find("means"),
            std::string::npos);
  v1::JobSpec sync = spec;
  sync.mutable_rounds()->set_staleness(2);
  EXPECT_NE(refused(sync).find("bounded only"), std::string::npos);
}

}  // namespace
}  // namespace gradwire::testing
