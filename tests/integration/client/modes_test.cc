// What workers may push and pull, late joiners, and the policies for non-finite gradients.
#include <cmath>
#include <limits>

#include "tests/integration/client/cluster.h"

namespace gradwire::testing {
namespace {

TEST(PullParams, FollowsTheShardsWithDenseAndSparseCodecs) {
  for (const std::string codec : {"dense:values=fixed16", "tagc:density=0.05"}) {
    Cluster cluster(2, "inproc");
    const v1::JobSpec spec = MakeSpec("params", codec, v1::OPTIMIZER_ADAMW, 3);
    std::vector<std::string> digests(3);
    InParallel(3, [&](int w) {
      const PullMode modes[] = {PullMode::kUpdate, PullMode::kParams, PullMode::kParamsBf16};
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(cluster.addresses(), modes[w]);
      ASSERT_TRUE(joined.ok()) << joined;
      for (uint64_t step = 0; step < 10; ++step) {
        worker.Fill(step);
        const absl::Status status = worker.Step(0.01f);
        ASSERT_TRUE(status.ok()) << status;
      }
      digests[w] = worker.session().Digest();
      if (w != 2) {
        EXPECT_EQ(worker.session().ShardDigests()[1], cluster.ParametersSha256(1, "params"));
      }
    });
    EXPECT_EQ(digests[0], digests[1]) << codec;
    EXPECT_NE(digests[0], digests[2]) << "bfloat16 parameters cannot be equal";
  }
}

TEST(PullMean, IsTheMeanOfWhatWasPushed) {
  Cluster cluster(2, "grpc");
  const v1::JobSpec spec = MakeSpec("mean", "dense:values=fp32", v1::OPTIMIZER_NONE, 2);
  for (const uint64_t before : {0u, 3u}) {  // the second time the job was there: workers were started again
    InParallel(2, [&](int w) {
      Worker worker(spec, w);
      const absl::Status joined = worker.Join(cluster.addresses(), PullMode::kMean);
      ASSERT_TRUE(joined.ok()) << joined;
      EXPECT_EQ(worker.session().start_version() > 0, before > 0);
      for (int step = 0; step < 3; ++step) {
        for (auto& gradient : worker.gradients())
          for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7 + w * 2 + step);
        ASSERT_TRUE(worker.Step(0).ok());
        for (auto& mean : worker.parameters())
          for (size_t i = 0; i < mean.size(); ++i) ASSERT_EQ(mean[i], static_cast<float>(i % 7 + 1 + step));
      }
    });
  }
}

TEST(LateJoiner, StartsAtTheSameRoundOnEveryShard) {
  Cluster cluster(3, "inproc");
  v1::JobSpec spec = MakeSpec("late", "tagc:density=0.05", v1::OPTIMIZER_ADAMW, 1);
  spec.set_max_workers(2);
  std::vector<std::string> digests(2);
  std::atomic<uint64_t> version{0};
  std::atomic<uint64_t> target{UINT64_MAX};  // both stop at this version, some rounds after the newcomer's first
  InParallel(2, [&](int w) {
    Worker worker(spec, w);
    if (w == 1) {
      while (version < 5) std::this_thread::yield();  // joins while the other one is stepping
      const absl::Status status = worker.Join(cluster.addresses());
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_GT(worker.session().start_version(), 4u);
      target = worker.session().start_version() + 20;
    } else {
      ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
    }
    while (worker.session().version() < target) {
      worker.Fill(worker.session().version());
      const absl::Status status = worker.Step(0.01f);
      ASSERT_TRUE(status.ok()) << status;
      if (w == 0) version = worker.session().version();
    }
    digests[w] = worker.session().Digest();
  });
  EXPECT_EQ(digests[0], digests[1]);
}

// Two workers that each want the means of half of the tensors get those that they would get with all; what travels back
// of the other half is what the next round needs.
TEST(PullMean, OfSomeTensorsIsAsOfAllAndTakesFewerBytes) {
  for (const char* codec : {"dense:fp32", "dense:fixed16", "tagc:density=0.05", "tagc:density=0.05,form=sketch",
                            "topk:density=0.05", "thc:bits=4", "powersgd:rank=2"}) {
    SCOPED_TRACE(codec);
    v1::JobSpec spec = MakeSpec("some", codec, v1::OPTIMIZER_NONE, 2);
    spec.set_bucket_bytes(1 << 14);
    std::vector<std::vector<std::vector<float>>> means[2];  // [all or some][worker]: its parameters
    uint64_t pulled[2] = {};
    for (const bool some : {false, true}) {
      means[some].resize(2);
      std::vector<uint64_t> bytes(2);
      Cluster cluster(2, "inproc");
      InParallel(2, [&](int w) {
        Worker worker(spec, w);
        SessionOptions options = worker.Options(cluster.addresses(), PullMode::kMean);
        for (size_t t = 0; some && t < options.memory.size(); ++t) {
          if ((t < options.memory.size() / 2) == (w == 0)) continue;
          std::fill(options.memory[t].begin(), options.memory[t].end(), 7.0f);
          options.memory[t] = {};
        }
        const absl::Status joined = worker.JoinWith(std::move(options));
        ASSERT_TRUE(joined.ok()) << joined;
        for (uint64_t step = 0; step < 6; ++step) {
          worker.FillApart(step);
          const absl::Status status = worker.Step(0.0f);
          ASSERT_TRUE(status.ok()) << status;
        }
        EXPECT_EQ(worker.session().Digest().size(), 64u);
        EXPECT_EQ(worker.session().ShardDigests().size(), 2u);
        means[some][static_cast<size_t>(w)] = worker.parameters();
        bytes[static_cast<size_t>(w)] = worker.session().stats().pulled_bytes;
      });
      pulled[some] = bytes[0] + bytes[1];
    }
    const size_t tensors = means[0][0].size();
    for (size_t t = 0; t < tensors; ++t) {
      const size_t of = t < tensors / 2 ? 0 : 1;
      EXPECT_EQ(means[1][of][t], means[0][of][t]) << "tensor " << t;
      for (const float x : means[1][1 - of][t]) ASSERT_EQ(x, 7.0f) << "tensor " << t;
    }
    // Factors are the plan of the next round: there is nothing to leave out.
    const bool factors = std::string_view(codec).starts_with("powersgd");
    EXPECT_LT(static_cast<double>(pulled[1]), (factors ? 1.01 : 0.75) * static_cast<double>(pulled[0]));
  }
}

TEST(PullMean, OfNothingIsRefusedWhereParametersArePulled) {
  Cluster cluster(1, "inproc");
  Worker worker(MakeSpec("none", "dense:fp32", v1::OPTIMIZER_ADAMW, 1), 0);
  SessionOptions options = worker.Options(cluster.addresses());
  options.memory[1] = {};
  const absl::Status status = worker.JoinWith(std::move(options));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("its memory has 0"), std::string_view::npos) << status;
}

TEST(NonFinite, IsRefusedByNameAndTheOthersGoOn) {
  for (const auto& [codec, small] :
       {std::pair("dense:values=fp32", false), {"tagc:density=0.05", false}, {"tagc:density=0.05", true}}) {
    Cluster cluster(2, "inproc");
    const v1::JobSpec large = MakeSpec("nan", codec, v1::OPTIMIZER_ADAMW, 2);
    const v1::JobSpec spec = small ? Small(large) : large;
    std::vector<std::string> digests(2);
    InParallel(2, [&](int w) {
      Worker worker(spec, w);
      ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
      for (uint64_t step = 0; step < 6; ++step) {
        worker.Fill(step);
        const bool bad = w == 1 && (step == 0 || step == 3);
        if (bad) worker.gradients()[3][17] = std::numeric_limits<float>::quiet_NaN();
        const absl::Status status = worker.Step(0.01f);
        EXPECT_EQ(status.ok(), !bad) << status;
        if (!bad) continue;
        EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
        for (const char* part : {"h.0.mlp.weight", "index 17", "nan", "round"})
          EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
      }
      digests[w] = worker.session().Digest();
    });
    EXPECT_EQ(digests[0], digests[1]);
  }
}

// Four times 2e5 are more than 64 bits of the grid hold: nobody gets a wrong sum, and who asks for it is told why. What
// is just below is summed to the last bit.
TEST(LargeGradients, AreSummedRightOrRefusedByName) {
  constexpr int kWorkers = 4;
  for (const float magnitude : {2e5f, std::nextafter(131'072.0f, 0.0f)}) {
    for (const char* codec : {"dense:fp32", "adaptive", "zen", "onebit", "linear:bits=8"}) {
      Cluster cluster(1, "inproc");
      const v1::JobSpec spec = MakeSpec("large", codec, v1::OPTIMIZER_NONE, kWorkers);
      InParallel(kWorkers, [&](int w) {
        Worker worker(spec, w);
        const absl::Status joined = worker.Join(cluster.addresses(), PullMode::kMean);
        ASSERT_TRUE(joined.ok()) << joined;
        for (auto& gradient : worker.gradients()) std::fill(gradient.begin(), gradient.end(), magnitude);
        const absl::Status status = worker.Step(0.0f);
        if (magnitude >= 131'072.0f) {
          EXPECT_TRUE(absl::IsInvalidArgument(status)) << codec << ": " << status;
          for (const char* part : {"tensor '", "200000", "131072", "max_workers is 4"})
            EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << codec << ": " << status;
          return;
        }
        ASSERT_TRUE(status.ok()) << codec << ": " << status;
        for (const auto& mean : worker.parameters()) {
          for (const float x : mean) ASSERT_EQ(x, magnitude) << codec;
        }
      });
    }
  }
}

TEST(NonFinite, IsSanitizedAndCounted) {
  Cluster cluster(1, "inproc");
  v1::JobSpec spec = MakeSpec("sanitize", "dense:values=fp32", v1::OPTIMIZER_ADAMW, 1);
  spec.set_nonfinite(v1::NONFINITE_SANITIZE);
  Worker worker(spec, 0);
  ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
  worker.Fill(0);
  worker.gradients()[0][3] = std::numeric_limits<float>::infinity();
  worker.gradients()[2][5] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(worker.Step(0.01f).ok());
  EXPECT_EQ(worker.session().stats().sanitized_elements, 2u);
  EXPECT_TRUE(worker.session().Leave().ok());
  EXPECT_EQ(cluster.Describe(0, "sanitize").sanitized_elements(), 2u);
  for (const auto& p : worker.parameters())
    for (float x : p) ASSERT_TRUE(std::isfinite(x));
}

void PushAndPull(const v1::JobSpec& spec) {
  Cluster cluster(2, "grpc");
  Worker worker(spec, 0);
  ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
  Session& session = worker.session();
  worker.Fill(0);
  ASSERT_TRUE(worker.Step(0.01f).ok());
  std::vector<const float*> gradients;
  for (const auto& g : worker.gradients()) gradients.push_back(g.data());
  const std::vector<float> rates = {0.01f};
  ASSERT_TRUE(session.BeginRound(rates).ok());
  const uint32_t buckets = session.layout().bucket_count();
  ASSERT_GT(buckets, 1u);
  for (uint32_t b = 0; b < buckets; ++b) {
    ASSERT_TRUE(session.Push(b, gradients).ok());
    ASSERT_TRUE(session.Pull(b).ok());
  }
  EXPECT_TRUE(absl::IsInvalidArgument(session.Push(buckets, gradients)));
  ASSERT_TRUE(session.EndRound().ok());
  EXPECT_EQ(session.ShardDigests()[0], cluster.ParametersSha256(0, "bucket"));
}

TEST(Session, PushAndPullOneBucket) {
  const v1::JobSpec spec = MakeSpec("bucket", "dense:values=fp32", v1::OPTIMIZER_SGD, 1);
  PushAndPull(spec);
  PushAndPull(Small(spec));
}

TEST(Session, SaysWhatIsWrongWithItsUse) {
  Cluster cluster(1, "inproc");
  Worker worker(MakeSpec("use", "dense:values=fp32", v1::OPTIMIZER_SGD, 1), 0);
  ASSERT_TRUE(worker.Join(cluster.addresses()).ok());
  Session& session = worker.session();
  const std::vector<float> one = {0.1f};
  const std::vector<float> three = {0.1f, 0.1f, 0.1f};
  EXPECT_TRUE(absl::IsFailedPrecondition(session.TensorReady(0, worker.gradients()[0].data())));
  EXPECT_TRUE(absl::IsFailedPrecondition(session.EndRound()));
  EXPECT_TRUE(absl::IsInvalidArgument(session.BeginRound(three)));
  ASSERT_TRUE(session.BeginRound(one).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(session.BeginRound(one)));
  EXPECT_TRUE(absl::IsInvalidArgument(session.TensorReady(99, worker.gradients()[0].data())));
  ASSERT_TRUE(session.TensorReady(0, worker.gradients()[0].data()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(session.TensorReady(0, worker.gradients()[0].data())));
  const absl::Status early = session.EndRound();
  EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
  EXPECT_NE(std::string(early.message()).find("h.0.attn.weight"), std::string::npos) << early;
  for (uint32_t t = 1; t < worker.gradients().size(); ++t)
    ASSERT_TRUE(session.TensorReady(t, worker.gradients()[t].data()).ok());
  EXPECT_TRUE(session.EndRound().ok());
  EXPECT_TRUE(session.Leave().ok());
  EXPECT_TRUE(absl::IsCancelled(session.BeginRound(one)));
}

}  // namespace
}  // namespace gradwire::testing
