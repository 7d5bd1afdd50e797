// Jobs that skip rounds with gradients that are not finite: all shards and workers alike, and what follows is as if the
// skipped steps had not been made.
#include <atomic>
#include <limits>
#include <random>
#include <set>
#include <thread>

#include "tests/integration/client/train.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

using testing_support::TcpProxy;

constexpr int kSkipWorkers = 2;
constexpr uint64_t kSkipSteps = 24;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What is bad in which step: 5 is a scalar, which lies on one shard.
struct Bad {
  uint64_t step;
  int worker;
  uint32_t tensor;
  float value;
};
constexpr Bad kBad[] = {{4, 0, 5, kNan},
                        {5, 1, 5, -kInfinity},
                        {9, 1, 0, kInfinity},
                        {9, 0, 6, kNan},
                        {13, 0, 3, 262144.0f},  // finite, and more than frames can carry
                        {kSkipSteps - 1, 1, 7, kNan}};

bool IsBad(const v1::JobSpec& spec, uint64_t step) {
  return std::any_of(std::begin(kBad), std::end(kBad), [&](const Bad& bad) {
    return bad.step == step && bad.tensor < static_cast<uint32_t>(spec.tensors_size());
  });
}

struct SkipCase {
  JobCase job;
  bool exact = true;  // false: which elements of equal magnitude are sent first depends on the number of the round
};

v1::JobSpec SpecOf(const SkipCase& c) {
  v1::JobSpec spec = SpecOf("skip", c.job, kSkipWorkers);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  return spec;
}

// `skipped`: the bad steps are made, and skipped; else they are left out.
std::set<std::string> TrainSkipping(const v1::JobSpec& spec, Cluster& cluster, PullMode pull, bool skipped) {
  std::vector<std::string> digests(kSkipWorkers);
  InParallel(kSkipWorkers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(cluster.addresses(), pull);
    ASSERT_TRUE(joined.ok()) << joined;
    uint64_t skips = 0, steps = 0;
    for (uint64_t step = 0; step < kSkipSteps; ++step) {
      if (IsBad(spec, step) && !skipped) continue;
      worker.Fill(step);
      for (const Bad& bad : kBad) {
        if (bad.step != step || bad.worker != w || bad.tensor >= worker.gradients().size()) continue;
        worker.gradients()[bad.tensor].back() = bad.value;
      }
      const std::string before = worker.session().Digest();
      const absl::Status stepped = worker.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << stepped;
      ++steps;
      const uint64_t so_far = worker.session().stats().nonfinite_rounds;
      EXPECT_EQ(worker.session().Digest() == before, so_far > skips) << "step " << step;
      skips = so_far;
    }
    EXPECT_EQ(worker.session().version(), steps + 1);
    EXPECT_EQ(worker.session().stats().steps, steps);
    digests[w] = worker.session().Digest();
    for (uint32_t s = 0; s < cluster.addresses().size(); ++s) {
      EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, spec.name())) << "worker " << w;
      EXPECT_EQ(cluster.Describe(s, spec.name()).rounds().nonfinite_rounds(), skips);
    }
    // The last one is of a tensor that a small job does not have.
    EXPECT_EQ(skips, !skipped ? 0u : worker.gradients().size() == 8 ? 5u : 4u);
  });
  return {digests.begin(), digests.end()};
}

class SkippedRounds : public ::testing::TestWithParam<SkipCase> {};

TEST_P(SkippedRounds, AreAsIfTheyHadNotBeen) {
  const SkipCase& c = GetParam();
  for (const uint32_t shards : {1u, 2u, 4u}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards"));
    v1::JobSpec spec = SpecOf(c);
    Cluster cluster(shards, shards == 2 ? "grpc" : "inproc");
    const std::set<std::string> with = TrainSkipping(spec, cluster, c.job.pull, true);
    EXPECT_EQ(with.size(), 1u);
    if (!c.exact) continue;
    spec.set_name("without");
    EXPECT_EQ(TrainSkipping(spec, cluster, c.job.pull, false), with);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, SkippedRounds,
    ::testing::Values(
        SkipCase{{"AdamW", "dense:values=fp32", v1::OPTIMIZER_ADAMW}},
        SkipCase{{"AdamWSmallParams", "dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kParams, 0, "", true}},
        SkipCase{{"AdamWFixed", "dense:values=fixed32", v1::OPTIMIZER_ADAMW}, false},
        SkipCase{{"LansFixed", "dense:values=fixed16", v1::OPTIMIZER_LANS, PullMode::kUpdate, 1.0f}, false},
        SkipCase{{"SgdFixed", "dense:values=fixed16", v1::OPTIMIZER_SGD}},
        SkipCase{{"TagcSteps", "tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_STEP}, false},
        SkipCase{{"TagcStepsParams", "tagc:density=0.05", v1::OPTIMIZER_STEP, PullMode::kParams, 0, "", true}, false},
        SkipCase{
            {"ThresholdClipped", "threshold:value=0.06,values=fp16", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, 0.5f}},
        SkipCase{{"Dgc", "dgc:density=0.05", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0, "", true}, false},
        SkipCase{{"OneBitTwoWayLans", "onebit", v1::OPTIMIZER_LANS, PullMode::kUpdate, 1.0f, "onebit"}},
        SkipCase{{"Lamb", "dense:values=fp32", v1::OPTIMIZER_LAMB, PullMode::kParams}},
        SkipCase{{"ZenTwoWay", "zen", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, 0, "efsignsgd"}},
        SkipCase{{"Adaptive", "adaptive", v1::OPTIMIZER_SGD}}),
    [](const auto& info) { return info.param.job.name; });

TEST(SkippedRound, OfTheVeryFirstStepLeavesTheInitialParameters) {
  for (const char* codec : {"dense:values=fp32", "tagc:density=0.05"}) {
    v1::JobSpec spec = MakeSpec("first", codec, v1::OPTIMIZER_ADAMW, kSkipWorkers);
    spec.set_nonfinite(v1::NONFINITE_SKIP);
    Cluster cluster(2, "inproc");
    std::set<std::string> digests;
    absl::Mutex mu;
    InParallel(kSkipWorkers, [&](int w) {
      Worker worker(spec, w);
      ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
      const std::string initial = worker.session().Digest();
      for (uint64_t step = 0; step < 6; ++step) {
        worker.Fill(step);
        if (step < 3) {
          for (auto& gradient : worker.gradients()) std::fill(gradient.begin(), gradient.end(), kInfinity);
        }
        ASSERT_TRUE(worker.Step(0.01f).ok());
        EXPECT_EQ(worker.session().stats().nonfinite_rounds, std::min<uint64_t>(step + 1, 3));
        EXPECT_EQ(worker.session().Digest() == initial, step < 3);
      }
      EXPECT_NE(worker.session().Digest(), initial);
      absl::MutexLock lock(&mu);
      digests.insert(worker.session().Digest());
    });
    EXPECT_EQ(digests.size(), 1u) << codec;
  }
}

// Its frame, which carries what earlier steps had left, is in a round that is skipped. It hears of that late, and the
// versions of the rounds that it makes next are gone by then: it asks for their updates, and catches up. Values are on
// a coarse grid and come from one worker alone, so that what is lost can be seen.
TEST(SkippedRound, LosesNothingOfAWorkerThatWasAway) {
  constexpr float kRate = 1.0f / 16;
  for (const PullMode pull : {PullMode::kUpdate, PullMode::kParams}) {
    SCOPED_TRACE(pull == PullMode::kUpdate ? "updates" : "parameters");
    Cluster cluster(2, "grpc");
    TcpProxy proxies[] = {TcpProxy(cluster.addresses()[0]), TcpProxy(cluster.addresses()[1])};
    v1::JobSpec spec = Small(MakeSpec("away", "topk:density=0.3", v1::OPTIMIZER_SGD, 2));
    spec.mutable_optimizer()->mutable_groups(0)->set_weight_decay(0);
    spec.set_nonfinite(v1::NONFINITE_SKIP);
    spec.set_lease_ms(900);
    const uint32_t buckets = Layout::Make(*Job::Make(spec), 2)->bucket_count();
    Worker near(spec, 0);
    Worker far(spec, 1);
    for (Worker* worker : {&near, &far})
      for (auto& tensor : worker->parameters()) std::fill(tensor.begin(), tensor.end(), 0.5f);
    ASSERT_TRUE(near.Join(cluster.addresses(), pull).ok());
    ASSERT_TRUE(far.Join({proxies[0].address(), proxies[1].address()}, pull).ok());
    std::mt19937 random(3);
    std::vector<std::vector<double>> pushed;
    for (const auto& gradient : far.gradients()) pushed.emplace_back(gradient.size());
    const auto fill = [&](bool counts) {
      for (size_t t = 0; t < pushed.size(); ++t)
        for (size_t i = 0; i < pushed[t].size(); ++i) {
          far.gradients()[t][i] = static_cast<float>(static_cast<int>(random() % 65) - 32) / 64;
          if (counts) pushed[t][i] += far.gradients()[t][i];
        }
    };
    const auto both = [&] {
      InParallel(2, [&](int w) {
        const absl::Status status = (w == 0 ? near : far).Step(kRate);
        ASSERT_TRUE(status.ok()) << status;
      });
    };
    for (int i = 0; i < 3; ++i) {
      fill(/*counts=*/true);
      both();
    }
    fill(/*counts=*/false);
    ASSERT_TRUE(far.session().BeginRound(std::vector<float>{kRate}).ok());
    std::vector<const float*> gradients;
    for (const auto& gradient : far.gradients()) gradients.push_back(gradient.data());
    for (uint32_t b = 0; b < buckets; ++b) ASSERT_TRUE(far.session().Push(b, gradients).ok());
    for (TcpProxy& proxy : proxies) proxy.Cut();
    near.gradients()[0][0] = NAN;
    ASSERT_TRUE(near.Step(kRate).ok());
    near.gradients()[0][0] = 0;
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(near.Step(kRate).ok());  // the first one waits for the lease
    EXPECT_EQ(near.session().stats().nonfinite_rounds, 1u);
    for (TcpProxy& proxy : proxies) proxy.Heal();
    // It catches up with a round that begins, or that has begun: the others go on meanwhile.
    std::atomic<bool> back = false;
    std::thread others([&] {
      while (!back) EXPECT_TRUE(near.Step(kRate).ok());
    });
    const absl::Status ended = far.session().EndRound();
    EXPECT_TRUE(ended.ok()) << ended;
    if (!ended.ok()) {
      far.Drop();
      back = true;
      others.join();
      return;
    }
    for (auto& gradient : far.gradients()) std::fill(gradient.begin(), gradient.end(), 0.0f);
    absl::Status drained;
    for (int left = 60; left > 0 && drained.ok(); --left) drained = far.Step(kRate);
    EXPECT_TRUE(drained.ok()) << drained;
    back = true;
    far.Drop();
    others.join();
    for (size_t t = 0; t < pushed.size(); ++t)
      for (size_t i = 0; i < pushed[t].size(); ++i)
        ASSERT_EQ(near.parameters()[t][i], 0.5 - kRate * pushed[t][i] / 2) << "tensor " << t << " element " << i;
  }
}

// Those that the skipped round was open for are told by its update; a newcomer starts behind it.
TEST(SkippedRound, IsCountedForANewcomer) {
  v1::JobSpec spec = MakeSpec("newcomer", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  spec.set_max_workers(2);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  for (const PullMode pull : {PullMode::kUpdate, PullMode::kParams}) {
    Cluster cluster(2, "inproc");
    std::vector<std::unique_ptr<Worker>> workers;
    for (int w = 0; w < 2; ++w) workers.push_back(std::make_unique<Worker>(spec, w));
    Worker &first = *workers[0], &second = *workers[1];
    std::atomic<uint64_t> version{0}, target{UINT64_MAX};
    std::vector<std::string> digests(2);
    InParallel(2, [&](int w) {
      Worker& worker = *workers[w];
      if (w == 1) {
        while (version < 6) std::this_thread::yield();
        const absl::Status joined = worker.Join(cluster.addresses(), pull);
        if (!joined.ok()) target = 0;
        ASSERT_TRUE(joined.ok()) << joined;
        target = worker.session().start_version() + 10;
      } else {
        ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
      }
      while (worker.session().version() < target) {
        const uint64_t round = worker.session().version();
        worker.Fill(round);
        if (round == (w == 0 ? 3 : target - 5)) worker.gradients()[1][0] = kNan;
        const absl::Status stepped = worker.Step(0.01f);
        ASSERT_TRUE(stepped.ok()) << stepped;
        if (w == 0) version = worker.session().version();
      }
      digests[w] = worker.session().Digest();
    });
    EXPECT_EQ(first.session().stats().nonfinite_rounds, 2u);
    EXPECT_EQ(second.session().stats().nonfinite_rounds, 1u);
    EXPECT_EQ(digests[0], digests[1]) << "they count the same steps";
  }
}

TEST(SkippedRound, IsRefusedWhereItHasNoMeaning) {
  v1::JobSpec spec = MakeSpec("job", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  spec.set_nonfinite(v1::NONFINITE_SKIP);
  ASSERT_TRUE(Job::Make(spec).ok());
  v1::JobSpec bounded = spec;
  bounded.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  bounded.mutable_rounds()->set_staleness(2);
  EXPECT_EQ(Job::Make(bounded).status().code(), absl::StatusCode::kInvalidArgument);
  v1::JobSpec async = spec;
  async.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  EXPECT_EQ(Job::Make(async).status().code(), absl::StatusCode::kInvalidArgument);
  v1::JobSpec mean = spec;
  mean.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  EXPECT_EQ(Job::Make(mean).status().code(), absl::StatusCode::kInvalidArgument);
  v1::JobSpec pairs = spec;
  pairs.set_codec("powersgd:rank=2");
  EXPECT_EQ(Job::Make(pairs).status().code(), absl::StatusCode::kInvalidArgument);
  spec.set_nonfinite(static_cast<v1::NonFinitePolicy>(17));
  EXPECT_EQ(Job::Make(spec).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire::testing
