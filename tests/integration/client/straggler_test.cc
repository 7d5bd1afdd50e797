// Workers that are late or away while the others go on: what they pushed is merged once or waits in their residuals,
// and they come back by themselves.
#include <array>
#include <atomic>
#include <cmath>
#include <map>

#include "tests/integration/client/applied.h"
#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

class Stragglers : public ::testing::TestWithParam<const char*> {};

// Gradients on a coarse grid are exact at every step; once rounds of zeros have emptied the residuals, all that was
// pushed is applied. A value beyond the range that the round before announced is cut, and its last bits leave when the
// exponent of its run has fallen: not before nobody has anything large.
TEST_P(Stragglers, WhatWasPushedIsAppliedThreeOfFour) {
  constexpr int kWorkers = 4;
  constexpr int kSteps = 40;
  Cluster cluster(2, "inproc");
  v1::JobSpec spec = Small(MakeSpec("three-of-four", GetParam(), v1::OPTIMIZER_SGD, kWorkers));
  spec.mutable_rounds()->set_quorum(3);
  Applied applied(spec, 2);
  for (uint32_t s = 0; s < 2; ++s) cluster.Create(spec, s, 2)->log().SetSink(applied.SinkOf(s));
  std::vector<std::vector<std::vector<double>>> pushed(kWorkers);
  std::vector<SessionStats> stats(kWorkers);
  std::array<std::atomic<int>, 2> emptying{};  // workers that push zeros
  InParallel(kWorkers, [&](int w) {
    Worker worker(spec, w);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    std::mt19937 random(static_cast<uint32_t>(w));
    for (const auto& gradient : worker.gradients()) pushed[w].emplace_back(gradient.size());
    const auto step = [&](bool zeros) {
      for (size_t t = 0; t < worker.gradients().size(); ++t) {
        for (size_t i = 0; i < worker.gradients()[t].size(); ++i) {
          const float value = zeros ? 0.0f : static_cast<float>(static_cast<int>(random() % 129) - 64) / 64;
          worker.gradients()[t][i] = value;
          pushed[w][t][i] += value;
        }
      }
      const absl::Status status = worker.Step(1e-4f);
      ASSERT_TRUE(status.ok()) << status;
    };
    for (int i = 0; i < kSteps; ++i) {
      if (w == 3 && i > 15 && i % 4 != 0) absl::SleepFor(absl::Milliseconds(30));
      step(false);
      if (HasFatalFailure()) return;
    }
    // First what is large leaves, then the last bits of it.
    for (std::atomic<int>& begun : emptying) {
      ++begun;
      for (int whole = 0; whole < 24;) {
        const bool all = begun == kWorkers;
        const SessionStats before = worker.session().stats();
        step(true);
        if (HasFatalFailure()) return;
        const SessionStats after = worker.session().stats();
        if (all && after.not_included_frames == before.not_included_frames &&
            after.skipped_rounds == before.skipped_rounds)
          ++whole;
      }
    }
    stats[w] = worker.session().stats();
  });
  EXPECT_GT(stats[3].not_included_frames, 0u);
  const auto& sums = applied.Sum();
  EXPECT_GT(applied.short_updates(), 0);
  for (size_t t = 0; t < sums.size(); ++t) {
    for (size_t i = 0; i < sums[t].size(); ++i) {
      double expected = 0;
      for (int w = 0; w < kWorkers; ++w) expected += pushed[w][t][i];
      ASSERT_EQ(sums[t][i], expected) << "tensor " << t << " element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, Stragglers, ::testing::Values("dense:values=fixed32", "tagc:density=0.3"),
                         [](const auto& info) { return info.param[0] == 'd' ? "Dense" : "Tagc"; });

class Away : public ::testing::TestWithParam<PullMode> {};

// With and without a quorum a worker that was away beyond its lease is back where the others are.
TEST_P(Away, WorkerThatWasCutOffBeyondItsLeaseReturns) {
  for (const uint32_t quorum : {0u, 1u}) {
    SCOPED_TRACE(quorum);
    Cluster cluster(2, "grpc");
    TcpProxy proxies[] = {TcpProxy(cluster.addresses()[0]), TcpProxy(cluster.addresses()[1])};
    const std::string name = absl::StrCat("away-", quorum);
    v1::JobSpec spec = MakeSpec(name, "tagc:density=0.2", v1::OPTIMIZER_ADAMW, 2);
    spec.set_lease_ms(900);
    spec.mutable_rounds()->set_quorum(quorum);
    Worker near(spec, 0);
    Worker far(spec, 1);
    ASSERT_TRUE(near.Join(cluster.addresses(), GetParam()).ok());
    ASSERT_TRUE(far.Join({proxies[0].address(), proxies[1].address()}, GetParam()).ok());
    const auto run = [](Worker& worker) {
      worker.Fill(worker.session().version());
      const absl::Status status = worker.Step(0.01f);
      EXPECT_TRUE(status.ok()) << status;
      return status.ok();
    };
    InParallel(2, [&](int w) { EXPECT_TRUE(run(w == 0 ? near : far)); });
    const uint64_t version = far.session().version();
    for (TcpProxy& proxy : proxies) proxy.Cut();
    std::atomic<uint64_t> target{UINT64_MAX};  // both stop at this version, some rounds after the return
    std::thread waiting([&] {
      if (!run(far)) target = 0;
      if (target != 0) target = far.session().version() + 5;
      while (far.session().version() < target && run(far)) {
      }
    });
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(run(near));  // the first ends with the other's lease
    for (uint32_t s = 0; s < 2; ++s) EXPECT_EQ(cluster.Workers(s, name), 1);
    for (TcpProxy& proxy : proxies) proxy.Heal();
    while (near.session().version() < target && run(near)) {
    }
    waiting.join();
    EXPECT_GT(target, version + 6);
    EXPECT_GE(far.session().stats().skipped_rounds, 4u);
    if (quorum == 0) {
      EXPECT_EQ(far.session().version(), near.session().version());
      EXPECT_EQ(far.session().Digest(), near.session().Digest());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pulls, Away, ::testing::Values(PullMode::kUpdate, PullMode::kParams),
                         [](const auto& info) { return info.param == PullMode::kUpdate ? "Update" : "Params"; });

// Callers that wait in short slices, as Python does between looks at signals, catch up like everybody else; and whoever
// rests meanwhile, evaluating say, holds up nobody whose quorum does without it.
TEST(Stragglers, CatchesUpInShortWaitsWhileTheOthersRest) {
  Cluster cluster(2, "inproc");
  v1::JobSpec spec = Small(MakeSpec("rest", "tagc:density=0.3", v1::OPTIMIZER_ADAMW, 2));
  spec.mutable_rounds()->set_quorum(1);
  Worker near(spec, 0);
  Worker far(spec, 1);
  ASSERT_TRUE(near.Join(cluster.addresses()).ok());
  ASSERT_TRUE(far.Join(cluster.addresses()).ok());
  const auto step = [](Worker& worker, int i) {
    worker.Fill(static_cast<uint64_t>(i));
    const absl::Status stepped = worker.Step(0.01f);
    EXPECT_TRUE(stepped.ok()) << stepped;
  };
  // How late members usually are is learned first.
  InParallel(2, [&](int w) {
    for (int i = 0; i < 20; ++i) step(w == 0 ? near : far, i);
  });
  const uint64_t version = far.session().version();
  for (int i = 0; i < 10; ++i) step(near, i);
  far.Fill(0);
  const std::vector<float> rates = {0.01f};
  ASSERT_TRUE(far.session().BeginRound(rates).ok());
  for (uint32_t t = 0; t < far.gradients().size(); ++t) {
    ASSERT_TRUE(far.session().TensorReady(t, far.gradients()[t].data()).ok());
  }
  absl::Status ended;
  for (int i = 0; i < 1000; ++i) {
    ended = far.session().EndRound(/*timeout_ms=*/50);
    if (!absl::IsDeadlineExceeded(ended)) break;
  }
  ASSERT_TRUE(ended.ok()) << ended;
  EXPECT_GT(far.session().version(), version + 9);
  for (int i = 0; i < 10; ++i) step(far, i);
  // The other one is the late one now.
  InParallel(2, [&](int w) {
    for (int i = 0; i < 10; ++i) step(w == 0 ? near : far, i);
  });
  EXPECT_GT(near.session().stats().skipped_rounds, 0u);
}

// Also where rounds are over before all shards were asked, again and again.
TEST(Stragglers, ANewcomerThatIsFarAwayJoinsWhileRoundsAreFast) {
  constexpr uint32_t kShards = 3;
  Cluster cluster(kShards, "grpc");
  std::vector<std::unique_ptr<TcpProxy>> proxies;
  std::vector<std::string> far_away;
  for (const std::string& address : cluster.addresses()) {
    far_away.push_back(proxies.emplace_back(std::make_unique<TcpProxy>(address))->address());
    proxies.back()->PassThrough([](uint64_t, bool, char*, size_t) { absl::SleepFor(absl::Milliseconds(1)); });
  }
  v1::JobSpec spec = Small(MakeSpec("fast", "dense:values=fp32", v1::OPTIMIZER_SGD, 3));
  spec.set_min_workers(2);
  spec.mutable_rounds()->set_quorum(1);
  std::atomic<bool> done{false};
  InParallel(3, [&](int w) {
    Worker worker(spec, w);
    if (w == 2) {  // how late the others are is learned first: for that long rounds wait for it
      while (cluster.Describe(0, "fast").version() < 100) absl::SleepFor(absl::Milliseconds(5));
      const absl::Status joined = worker.Join(far_away);
      EXPECT_TRUE(joined.ok()) << joined;
      done = true;
      return;
    }
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    while (!done) {
      worker.Fill(0);
      const absl::Status status = worker.Step(0.01f);
      ASSERT_TRUE(status.ok()) << status;
    }
  });
}

// A newcomer gets its start version although rounds do not wait for it.
TEST(Stragglers, NewcomerJoinsWhileAQuorumTrains) {
  Cluster cluster(2, "inproc");
  v1::JobSpec spec = Small(MakeSpec("newcomer", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 3));
  spec.set_min_workers(2);
  spec.mutable_rounds()->set_quorum(1);
  std::atomic<bool> done{false};
  InParallel(3, [&](int w) {
    Worker worker(spec, w);
    while (w == 2 && cluster.Describe(0, "newcomer").version() < 30) absl::SleepFor(absl::Milliseconds(5));
    const absl::Status joined = worker.Join(cluster.addresses());
    ASSERT_TRUE(joined.ok()) << joined;
    for (int i = 0; w == 2 ? i < 20 : !done; ++i) {
      worker.Fill(static_cast<uint64_t>(i));
      const absl::Status status = worker.Step(0.01f);
      ASSERT_TRUE(status.ok()) << status;
    }
    if (w == 2) {
      EXPECT_GE(worker.session().start_version(), 30u);
      done = true;
    }
  });
}

}  // namespace
}  // namespace gradwire::testing
