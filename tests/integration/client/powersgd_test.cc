// Jobs whose steps take two rounds: the same bits on any number of shards and for every way to pull; workers that come
// and go between the two; a matrix that is learnt; what is not served is refused with a reason.
#include <cmath>
#include <set>

#include "tests/integration/client/cluster.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::testing {
namespace {

constexpr int kPairWorkers = 2;
constexpr uint64_t kPairSteps = 30;

struct PairCase {
  std::string name;
  v1::OptimizerKind optimizer;
  PullMode pull = PullMode::kUpdate;
  float clip = 0;
  bool small = false;
  uint32_t quorum = 0;
};

v1::JobSpec PairSpec(const PairCase& c, const std::string& name) {
  v1::JobSpec spec = MakeSpec(name, "powersgd:rank=2", c.optimizer, kPairWorkers);
  spec.set_clip_norm(c.clip);
  spec.mutable_rounds()->set_quorum(c.quorum);
  return c.small ? Small(std::move(spec)) : spec;
}

class TwoPhases : public ::testing::TestWithParam<PairCase> {};

TEST_P(TwoPhases, GiveTheSameBitsOnAnyNumberOfShards) {
  const PairCase& c = GetParam();
  std::set<std::string> all;
  for (const uint32_t shards : {1u, 2u, 4u}) {
    Cluster cluster(shards, shards == 2 ? "grpc" : shards == 4 ? "tcp" : "inproc");
    const v1::JobSpec spec = PairSpec(c, "pairs");
    std::vector<std::string> digests(kPairWorkers);
    InParallel(kPairWorkers, [&](int w) {
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(cluster.addresses(), c.pull);
      ASSERT_TRUE(joined.ok()) << joined;
      const std::string first = worker.session().Digest();
      for (uint64_t step = 0; step < kPairSteps; ++step) {
        worker.Fill(step);
        const absl::Status stepped = worker.Step(0.01f);
        ASSERT_TRUE(stepped.ok()) << stepped;
        EXPECT_EQ(worker.session().version(), 2 * (step + 1));
      }
      EXPECT_EQ(worker.session().stats().steps, kPairSteps);
      digests[w] = worker.session().Digest();
      EXPECT_NE(digests[w], first) << "nothing was learnt";
      for (uint32_t s = 0; s < shards && c.pull != PullMode::kMean; ++s) {
        EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, "pairs")) << "worker " << w;
      }
    });
    all.insert(digests.begin(), digests.end());
  }
  EXPECT_EQ(all.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Jobs, TwoPhases,
                         ::testing::Values(PairCase{"AdamW", v1::OPTIMIZER_ADAMW},
                                           PairCase{"AdamWParams", v1::OPTIMIZER_ADAMW, PullMode::kParams},
                                           PairCase{"StepSmall", v1::OPTIMIZER_STEP, PullMode::kUpdate, 0, true},
                                           PairCase{"Mean", v1::OPTIMIZER_NONE, PullMode::kMean},
                                           PairCase{"LansClipped", v1::OPTIMIZER_LANS, PullMode::kUpdate, 1.0f},
                                           PairCase{"SgdQuorumOfAll", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0, false,
                                                    kPairWorkers}),
                         [](const auto& info) { return info.param.name; });

// The first round of a step has both workers, the second one alone, and so on; a newcomer may begin with either.
TEST(TwoPhasesOfAStep, MayHaveDifferentWorkers) {
  Cluster cluster(2, "grpc");
  v1::JobSpec spec = MakeSpec("coming", "powersgd:rank=2", v1::OPTIMIZER_ADAMW, 1);
  spec.set_max_workers(2);
  Worker first(spec, 0);
  ASSERT_TRUE(first.Join(cluster.addresses()).ok());
  std::atomic<bool> done{false};
  std::string digest;
  std::thread steady([&] {
    for (uint64_t step = 0; !done; ++step) {
      first.Fill(step);
      const absl::Status stepped = first.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
  });
  std::set<uint64_t> starts;
  std::mt19937 random(3);
  for (int n = 0; n < 60 && (starts.size() < 2 || n < 12); ++n) {
    Worker other(spec, 1);
    const absl::Status joined = other.Join(cluster.addresses());
    ASSERT_TRUE(joined.ok()) << joined;
    starts.insert(other.session().start_version() % 2);
    for (uint64_t step = 0; step < 3; ++step) {
      other.Fill(step);
      const absl::Status stepped = other.Step(0.01f);
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
    // It goes behind a step, or with the first of its two frames.
    if (n % 2 == 0) {
      const std::vector<float> rates = {0.01f};
      ASSERT_TRUE(other.session().BeginRound(rates).ok());
      for (uint32_t t = 0; t < other.gradients().size(); ++t) {
        ASSERT_TRUE(other.session().TensorReady(t, other.gradients()[t].data()).ok());
      }
    }
    other.Drop();
  }
  EXPECT_EQ(starts.size(), 2u) << "newcomers began with one kind of round only";
  done = true;
  steady.join();
  Worker last(spec, 1);
  ASSERT_TRUE(first.session().Leave().ok());
  first.Drop();
  ASSERT_TRUE(last.Join(cluster.addresses()).ok());
  EXPECT_TRUE(first.parameters() == last.parameters()) << "a newcomer has what the one that stayed had";
}

// A worker that was killed between its two frames: the others wait for its lease, and nothing of theirs is lost.
TEST(TwoPhasesOfAStep, GoOnBehindTheLeaseOfAWorkerThatDied) {
  Cluster cluster(1, "grpc");
  testing_support::TcpProxy proxy(cluster.addresses()[0]);
  v1::JobSpec spec = MakeSpec("lost", "powersgd:rank=2", v1::OPTIMIZER_SGD, 2);
  spec.set_lease_ms(3000);
  Worker stays(spec, 0), dies(spec, 1);
  std::thread joining([&] { ASSERT_TRUE(stays.Join(cluster.addresses()).ok()); });
  SessionOptions options = dies.Options({proxy.address()});
  ASSERT_TRUE(dies.JoinWith(std::move(options)).ok());
  joining.join();
  InParallel(2, [&](int w) {
    Worker& worker = w == 0 ? stays : dies;
    worker.Fill(0);
    ASSERT_TRUE(worker.Step(0.01f).ok());
  });
  const std::vector<float> rates = {0.01f};
  dies.Fill(1);
  ASSERT_TRUE(dies.session().BeginRound(rates).ok());
  std::vector<const float*> gradients;
  for (const auto& gradient : dies.gradients()) gradients.push_back(gradient.data());
  for (uint32_t b = 0; b < dies.session().layout().bucket_count(); ++b) {
    ASSERT_TRUE(dies.session().Push(b, gradients).ok());
  }
  proxy.Cut();  // all of its first frames are there, and nothing follows
  stays.Fill(1);
  const absl::Status stepped = stays.Step(0.01f);
  ASSERT_TRUE(stepped.ok()) << stepped;
  EXPECT_EQ(stays.session().version(), 4u);
  EXPECT_EQ(stays.session().stats().not_included_frames, 0u);
  EXPECT_EQ(stays.session().ShardDigests()[0], cluster.ParametersSha256(0, "lost"));
}

// Least squares towards a matrix of rank 2: it is found, and far fewer bytes travel.
TEST(TwoPhasesOfAStep, LearnAMatrixOfLowRank) {
  constexpr uint64_t kSteps = 40;
  v1::JobSpec spec;
  spec.set_name("low-rank");
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  tensor->add_shape(120);
  tensor->add_shape(200);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec("powersgd:rank=2");
  spec.set_min_workers(2);
  spec.set_max_workers(2);
  Cluster cluster(2, "inproc");
  InParallel(2, [&](int w) {
    Worker worker(spec, w);
    for (auto& values : worker.parameters()) std::fill(values.begin(), values.end(), 0.0f);
    ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    const auto target = [](uint64_t i, uint64_t j) {
      return std::sin(0.1f * static_cast<float>(i)) * std::cos(0.2f * static_cast<float>(j)) +
             0.5f * std::cos(0.3f * static_cast<float>(i)) * std::sin(0.05f * static_cast<float>(j));
    };
    const uint64_t initial = worker.session().stats().pushed_bytes;
    double error = 0;
    for (uint64_t step = 0; step < kSteps; ++step) {
      error = 0;
      for (uint64_t i = 0; i < 120; ++i) {
        for (uint64_t j = 0; j < 200; ++j) {
          const float difference = worker.parameters()[0][i * 200 + j] - target(i, j);
          error += static_cast<double>(difference) * static_cast<double>(difference);
          // What one worker sees too much of, the other sees too little of.
          const float noise = 0.1f * static_cast<float>((i * 7 + j * 13) % 11) * (w == 0 ? 1.0f : -1.0f);
          worker.gradients()[0][i * 200 + j] = difference + noise;
        }
      }
      ASSERT_TRUE(worker.Step(0.5f).ok());
    }
    EXPECT_LT(error, 1e-6 * 120 * 200);
    // The factors of both rounds, and their headers on two shards.
    EXPECT_LT(worker.session().stats().pushed_bytes - initial, kSteps * (4 * 2 * (120 + 200) + 600));
  });
}

// The factors of 8 workers whose gradients are 20,000 everywhere do not fit 64 bits of the grid, those of 15,000 do:
// what is beyond waits for the next step.
TEST(TwoPhasesOfAStep, SumLargeFactorsOverSeveralSteps) {
  constexpr int kWorkers = 8;
  v1::JobSpec spec;
  spec.set_name("large");
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  tensor->add_shape(16);
  tensor->add_shape(16);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_NONE);
  spec.set_codec("powersgd:rank=1");
  spec.set_min_workers(kWorkers);
  spec.set_max_workers(kWorkers);
  for (const float magnitude : {20'000.0f, 15'000.0f}) {
    Cluster cluster(1, "inproc");
    InParallel(kWorkers, [&](int w) {
      Worker worker(spec, w);
      ASSERT_TRUE(worker.Join(cluster.addresses(), PullMode::kMean).ok());
      float sum = 0;
      for (int step = 0; step < 4; ++step) {
        std::fill(worker.gradients()[0].begin(), worker.gradients()[0].end(), step == 0 ? magnitude : 0.0f);
        const absl::Status status = worker.Step(0.0f);
        ASSERT_TRUE(status.ok()) << status;
        sum += worker.parameters()[0][0];
        if (step != 0) continue;
        EXPECT_EQ(std::abs(sum - magnitude) < 0.1f * magnitude, magnitude == 15'000.0f) << sum;
      }
      EXPECT_LE(std::abs(sum - magnitude), 1e-3f * magnitude);
    });
  }
}

TEST(TwoPhasesOfAStep, AreRefusedWhereTheyHaveNoMeaning) {
  const v1::JobSpec spec = MakeSpec("job", "powersgd:rank=2", v1::OPTIMIZER_SGD, 1);
  ASSERT_TRUE(Job::Make(spec).ok());
  const auto error = [&](const std::function<void(v1::JobSpec*)>& change) {
    v1::JobSpec changed = spec;
    change(&changed);
    const absl::Status status = Job::Make(changed).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_NE(error([](v1::JobSpec* s) { s->mutable_rounds()->set_mode(v1::ROUNDS_ASYNC); }).find("rounds.mode sync"),
            std::string::npos);
  EXPECT_NE(error([](v1::JobSpec* s) {
              s->mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
              s->mutable_rounds()->set_staleness(2);
            }).find("rounds.mode sync"),
            std::string::npos);
  EXPECT_NE(error([](v1::JobSpec* s) { s->set_update_codec("fp16"); }).find("update_codec"), std::string::npos);
  EXPECT_NE(error([](v1::JobSpec* s) {
              v1::CodecRule* rule = s->add_rules();
              rule->set_pattern("head*");
              rule->set_codec("topk");
            }).find("topk"),
            std::string::npos);
  EXPECT_NE(error([](v1::JobSpec* s) {
              s->mutable_tensors(0)->set_shape(0, 1 << 16);
              s->mutable_tensors(0)->set_shape(1, 1 << 16);
            }).find("embed.weight"),
            std::string::npos);
}

}  // namespace
}  // namespace gradwire::testing
