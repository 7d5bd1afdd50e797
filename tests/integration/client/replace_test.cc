// Parameters that workers replace in mid-job: on all shards and workers alike, and optimizers go on as if nothing had
// been. What happened otherwise is an error that says so.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <set>

#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kReplaceWorkers = 2;

struct ReplaceCase {
  JobCase job;
  bool skips = false;
};

v1::JobSpec SpecOf(const ReplaceCase& c) {
  v1::JobSpec spec = SpecOf("replace", c.job, kReplaceWorkers);
  if (c.skips) spec.set_nonfinite(v1::NONFINITE_SKIP);
  return spec;
}

void Overwrite(Worker& worker, uint32_t seed) {
  std::mt19937 random(seed);
  for (auto& tensor : worker.parameters())
    for (float& x : tensor) x = std::normal_distribution<float>(0, 0.2f)(random);
}

absl::Status Replace(Worker& worker) {
  const absl::Status begun = worker.session().BeginReplacement();
  return begun.ok() ? worker.session().EndRound() : begun;
}

absl::Status Train(Worker& worker, uint64_t first, uint64_t last) {
  for (uint64_t step = first; step < last; ++step) {
    worker.Fill(step);
    const absl::Status stepped = worker.Step(0.01f);
    if (!stepped.ok()) return stepped;
  }
  return absl::OkStatus();
}

class ReplacedParameters : public ::testing::TestWithParam<ReplaceCase> {};

TEST_P(ReplacedParameters, AreThoseOfAllShardsAndWorkers) {
  const ReplaceCase& c = GetParam();
  for (const uint32_t shards : {1u, 3u}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards"));
    const v1::JobSpec spec = SpecOf(c);
    Cluster cluster(shards, shards == 3 ? "grpc" : "inproc");
    std::vector<std::string> digests(kReplaceWorkers);
    InParallel(kReplaceWorkers, [&](int w) {
      Worker worker(spec, w);
      ASSERT_EQ(worker.Join(cluster.addresses(), c.job.pull), absl::OkStatus());
      ASSERT_EQ(Train(worker, 0, 4), absl::OkStatus());
      for (const uint32_t seed : {1u, 2u}) {
        Overwrite(worker, seed);
        const auto given = worker.parameters();
        ASSERT_EQ(Replace(worker), absl::OkStatus());
        if (c.job.pull != PullMode::kParamsBf16) {
          EXPECT_EQ(worker.parameters(), given);
        }
      }
      EXPECT_EQ(worker.session().version(), 7u);
      EXPECT_EQ(worker.session().stats().nonfinite_rounds, 0u) << "none was skipped";
      ASSERT_EQ(Train(worker, 4, 9), absl::OkStatus());
      digests[w] = worker.session().Digest();
      if (c.job.pull == PullMode::kParamsBf16) return;
      for (uint32_t s = 0; s < shards; ++s)
        EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, spec.name())) << "worker " << w;
    });
    EXPECT_EQ(digests[0], digests[1]);
    EXPECT_EQ(cluster.Describe(0, spec.name()).rounds().nonfinite_rounds(), 2u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, ReplacedParameters,
    ::testing::Values(
        ReplaceCase{{"DenseAdamw", "dense:values=fp32", v1::OPTIMIZER_ADAMW}},
        ReplaceCase{{"DenseSgdSmall", "dense:values=fp32", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0, "", true}},
        ReplaceCase{{"Fixed", "dense:values=fixed16", v1::OPTIMIZER_ADAMW}},
        ReplaceCase{{"FixedParams", "dense:values=fixed16", v1::OPTIMIZER_ADAMW, PullMode::kParams}},
        ReplaceCase{{"TagcStep", "tagc:density=0.05", v1::OPTIMIZER_STEP}},
        ReplaceCase{{"TagcParams", "tagc:density=0.05", v1::OPTIMIZER_ADAMW, PullMode::kParams}},
        ReplaceCase{{"TagcBf16", "tagc:density=0.05", v1::OPTIMIZER_ADAMW, PullMode::kParamsBf16}},
        ReplaceCase{{"TopkTwoWay", "topk:density=0.05", v1::OPTIMIZER_STEP, PullMode::kUpdate, 0, "topk:density=0.05"}},
        ReplaceCase{{"RandomkStep", "randomk:density=0.05", v1::OPTIMIZER_STEP}},
        ReplaceCase{{"Onebit", "onebit", v1::OPTIMIZER_SGD}},
        ReplaceCase{{"LansSkipping", "dense:values=fp32", v1::OPTIMIZER_LANS}, true},
        ReplaceCase{{"AdamwClipped", "dense:values=fp32", v1::OPTIMIZER_ADAMW, PullMode::kUpdate, 0.5f}}),
    [](const auto& info) { return info.param.job.name; });

// By what is there already: the steps before and after it make what they make without it, bias corrections included.
TEST(ReplacedParametersTest, RoundIsNoStep) {
  for (const v1::OptimizerKind optimizer : {v1::OPTIMIZER_ADAMW, v1::OPTIMIZER_LANS, v1::OPTIMIZER_SGD}) {
    std::set<std::string> digests;
    for (const bool replaces : {false, true}) {
      const v1::JobSpec spec = MakeSpec("same", "dense:values=fp32", optimizer, kReplaceWorkers);
      Cluster cluster(2, "inproc");
      std::vector<std::string> found(kReplaceWorkers);
      InParallel(kReplaceWorkers, [&](int w) {
        Worker worker(spec, w);
        ASSERT_EQ(worker.Join(cluster.addresses()), absl::OkStatus());
        ASSERT_EQ(Train(worker, 0, 2), absl::OkStatus());
        if (replaces) {
          ASSERT_EQ(Replace(worker), absl::OkStatus());
        }
        ASSERT_EQ(Train(worker, 2, 5), absl::OkStatus());
        found[w] = worker.session().Digest();
      });
      digests.insert(found.begin(), found.end());
    }
    EXPECT_EQ(digests.size(), 1u);
  }
}

TEST(ReplacedParametersTest, OtherValuesAreRefused) {
  const v1::JobSpec spec = MakeSpec("other", "dense:values=fp32", v1::OPTIMIZER_ADAMW, kReplaceWorkers);
  Cluster cluster(2, "inproc");
  std::vector<absl::Status> ended(kReplaceWorkers);
  InParallel(kReplaceWorkers, [&](int w) {
    Worker worker(spec, w);
    ASSERT_EQ(worker.Join(cluster.addresses()), absl::OkStatus());
    ASSERT_EQ(Train(worker, 0, 2), absl::OkStatus());
    Overwrite(worker, 1);
    // In the last element only, by one bit.
    if (w == 1) worker.parameters().back().back() = std::nextafter(worker.parameters().back().back(), 10.0f);
    ended[w] = Replace(worker);
  });
  const absl::Status& refused = ended[0].ok() ? ended[1] : ended[0];
  EXPECT_NE(ended[0].ok(), ended[1].ok());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the same values, to the last bit"));
}

TEST(ReplacedParametersTest, OneThatStepsInsteadIsTold) {
  const v1::JobSpec spec = MakeSpec("mixed", "dense:values=fp32", v1::OPTIMIZER_ADAMW, kReplaceWorkers);
  for (const int first : {0, 1}) {
    Cluster cluster(1, "inproc");
    std::atomic<bool> sent{false};
    std::vector<absl::Status> ended(kReplaceWorkers);
    InParallel(kReplaceWorkers, [&](int w) {
      Worker worker(spec, w);
      ASSERT_EQ(worker.Join(cluster.addresses()), absl::OkStatus());
      ASSERT_EQ(Train(worker, 0, 2), absl::OkStatus());
      worker.Fill(2);
      while (w != first && !sent) usleep(1000);
      if (w == 0) {
        Overwrite(worker, 1);
        ASSERT_EQ(worker.session().BeginReplacement(), absl::OkStatus());
      } else {
        ASSERT_EQ(worker.session().BeginRound(std::vector<float>{0.01f}), absl::OkStatus());
        for (uint32_t t = 0; t < worker.gradients().size(); ++t)
          ASSERT_EQ(worker.session().TensorReady(t, worker.gradients()[t].data()), absl::OkStatus());
      }
      if (w == first) usleep(200'000);
      sent = true;
      ended[w] = worker.session().EndRound();
    });
    for (const absl::Status& status : ended) {
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("in the same step"));
    }
    EXPECT_FALSE(ended[0].ok() && ended[1].ok());
  }
}

TEST(ReplacedParametersTest, WhatCannotBeIsRefusedAndTheSessionGoesOn) {
  const v1::JobSpec spec = MakeSpec("bad", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  Cluster cluster(2, "inproc");
  Worker worker(spec, 0);
  ASSERT_EQ(worker.Join(cluster.addresses()), absl::OkStatus());
  EXPECT_EQ(Replace(worker).code(), absl::StatusCode::kFailedPrecondition) << "round 0 calibrates";
  ASSERT_EQ(Train(worker, 0, 2), absl::OkStatus());
  const auto before = worker.parameters();
  worker.parameters()[3][77] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status bad = Replace(worker);
  EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.message()), HasSubstr("tensor 'h.0.mlp.weight', element 77"));
  worker.parameters() = before;
  EXPECT_EQ(Train(worker, 2, 4), absl::OkStatus());
  EXPECT_EQ(worker.session().version(), 5u);
}

TEST(ReplacedParametersTest, JobsWhoseWorkersDoNotGoInStepRefuse) {
  const auto expect = [](v1::JobSpec spec, PullMode pull, absl::StatusCode code) {
    Cluster cluster(1, "inproc");
    Worker worker(spec, 0);
    ASSERT_EQ(worker.Join(cluster.addresses(), pull), absl::OkStatus());
    ASSERT_EQ(Train(worker, 0, 2), absl::OkStatus());
    EXPECT_EQ(worker.session().BeginReplacement().code(), code);
    EXPECT_EQ(Train(worker, 2, 3), absl::OkStatus());
  };
  const v1::JobSpec spec = MakeSpec("job", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  v1::JobSpec bounded = spec, async = spec, quorum = spec;
  bounded.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  bounded.mutable_rounds()->set_staleness(1);
  async.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  quorum.set_max_workers(2);
  quorum.mutable_rounds()->set_quorum(1);
  expect(bounded, PullMode::kUpdate, absl::StatusCode::kUnimplemented);
  expect(async, PullMode::kParams, absl::StatusCode::kUnimplemented);
  expect(quorum, PullMode::kUpdate, absl::StatusCode::kUnimplemented);
  expect(MakeSpec("job", "powersgd:rank=2", v1::OPTIMIZER_SGD, 1), PullMode::kUpdate, absl::StatusCode::kUnimplemented);
  expect(MakeSpec("job", "dense:values=fp32", v1::OPTIMIZER_NONE, 1), PullMode::kMean,
         absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire::testing
