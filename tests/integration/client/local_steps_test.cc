// Local SGD with an outer optimizer (DiLoCo, arXiv 2311.08105): workers make H steps by themselves and push how far
// they came (push delta); the shards' SGD with Nesterov momentum steps along the mean. Against the definition in
// float64.
#include <cmath>

#include "tests/integration/client/cluster.h"

namespace gradwire::testing {
namespace {

constexpr int kWorkers = 2;
constexpr uint64_t kRounds = 30;
constexpr int kLocalSteps = 5;
constexpr double kInnerRate = 0.0625, kOuterRate = 0.75, kMomentum = 0.875;  // exact in float32

// Worker w pulls element i towards its own target.
double TargetOf(int worker, size_t tensor, size_t i) {
  return std::sin(0.1 * static_cast<double>(i + 7 * tensor)) + 0.25 * worker;
}

template <typename T>
T AfterLocalSteps(T x, int worker, size_t tensor, size_t i) {
  for (int step = 0; step < kLocalSteps; ++step) {
    x -= static_cast<T>(kInnerRate) * (x - static_cast<T>(TargetOf(worker, tensor, i)));
  }
  return x;
}

TEST(LocalSteps, OuterNesterovFollowsItsDefinition) {
  v1::JobSpec spec = MakeSpec("local", "dense:values=fp32", v1::OPTIMIZER_SGD, kWorkers);
  spec.set_push(v1::PUSH_DELTA);
  v1::OptimizerGroup* group = spec.mutable_optimizer()->mutable_groups(0);
  group->set_weight_decay(0);
  group->set_momentum(static_cast<float>(kMomentum));
  group->set_nesterov(true);
  Cluster cluster(2, "inproc");
  std::vector<std::vector<std::vector<float>>> starts(kWorkers), ends(kWorkers);
  InParallel(kWorkers, [&](int w) {
    Worker worker(spec, w);
    starts[w] = worker.parameters();
    const absl::Status joined = worker.Join(cluster.addresses());
    ASSERT_TRUE(joined.ok()) << joined;
    for (uint64_t round = 0; round < kRounds; ++round) {
      for (size_t t = 0; t < worker.parameters().size(); ++t) {
        for (size_t i = 0; i < worker.parameters()[t].size(); ++i) {
          const float x = worker.parameters()[t][i];
          worker.gradients()[t][i] = x - AfterLocalSteps(x, w, t, i);
        }
      }
      const absl::Status stepped = worker.Step(static_cast<float>(kOuterRate));
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
    ends[w] = worker.parameters();
  });
  EXPECT_EQ(ends[0], ends[1]);
  double largest = 0;
  for (size_t t = 0; t < starts[0].size(); ++t) {
    for (size_t i = 0; i < starts[0][t].size(); ++i) {
      double x = starts[0][t][i], momentum = 0;
      for (uint64_t round = 0; round < kRounds; ++round) {
        double delta = 0;
        for (int w = 0; w < kWorkers; ++w) delta += (x - AfterLocalSteps(x, w, t, i)) / kWorkers;
        momentum = kMomentum * momentum + delta;
        x -= kOuterRate * (delta + kMomentum * momentum);
      }
      largest = std::max(largest, std::abs(x - static_cast<double>(ends[0][t][i])));
    }
  }
  EXPECT_LT(largest, 1e-5);
}

}  // namespace
}  // namespace gradwire::testing
