// Every backend drives the same job: frames, merged sums, updates, residuals and parameters are the same bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

struct Gradient {
  const char* name;
  GradientFn (*make)(uint64_t seed, uint64_t elements);
};

// What selection and quantisation find hard.
GradientFn Adversarial(uint64_t, uint64_t) {
  return [](uint32_t worker, uint64_t round, std::vector<float>* out) {
    for (size_t i = 0; i < out->size(); ++i) {
      const uint64_t kind = (i * 2654435761u + worker + round) % 7;
      (*out)[i] = kind == 0   ? 1e-42f  // a denormal
                  : kind == 1 ? -0.0f
                  : kind < 4  ? 0.5f
                              : -0.5f;
    }
    if (!out->empty()) (*out)[out->size() / 2] = 1000.0f;
  };
}

constexpr Gradient kGradients[] = {
    {"Gaussian", [](uint64_t seed, uint64_t n) { return GaussianGradient(seed, n); }},
    {"uniform", [](uint64_t seed, uint64_t n) { return DyadicGradient(seed, n, 0.1, false); }},
    {"clustered", [](uint64_t seed, uint64_t n) { return DyadicGradient(seed, n, 0.03, true); }},
    {"adversarial", &Adversarial},
};

// Parameters and optimizer state of both sides, moved by the mean of every update.
struct Replica {
  explicit Replica(const std::string& name, size_t n)
      : backend(*kernels::MakeBackend(name)), sgd(n, 1.0f), momentum(n, 0.0f), adamw(n, 1.0f), m(n, 0.0f), v(n, 0.0f) {}

  void Step(const Cluster& cluster, const Update& update, uint64_t t) {
    std::vector<float> mean(sgd.size());
    for (uint32_t run = 0; run < cluster.layout().runs.size(); ++run) {
      update.MeanOfRun(cluster.layout(), run, mean.data() + cluster.layout().run_begin[run]);
    }
    backend->Sgd(sgd.data(), mean.data(), momentum.data(), sgd.size(), {0.1f, 0.01f, 0.9f, false}, nullptr);
    backend->AdamW(adamw.data(), mean.data(), m.data(), v.data(), adamw.size(),
                   kernels::MakeAdamW(0.01f, 0.1f, 0.9f, 0.99f, 1e-8f, t), nullptr);
  }

  std::unique_ptr<kernels::Backend> backend;
  std::vector<float> sgd, momentum, adamw, m, v;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void ExpectSameJob(ClusterOptions options, const std::string& backend, const Gradient& gradient) {
  Cluster expected(options);
  Replica expected_replica("reference", options.elements);
  options.backend = backend;
  Cluster cluster(options);
  Replica replica(backend, options.elements);
  const GradientFn g = gradient.make(7, options.elements);
  for (uint64_t t = 1; t <= 5; ++t) {
    const RoundResult a = expected.Round(g);
    const RoundResult b = cluster.Round(g);
    for (uint32_t w = 0; w < options.workers; ++w) {
      ASSERT_EQ(Joined(a.frames[w].chunks), Joined(b.frames[w].chunks)) << "frame of worker " << w << ", round " << t;
      ASSERT_TRUE(SameBits(expected.pending(w), cluster.pending(w))) << "residual of worker " << w << ", round " << t;
    }
    ASSERT_EQ(Joined(a.update_frame.chunks), Joined(b.update_frame.chunks)) << "update frame of round " << t;
    expected_replica.Step(expected, a.update, t);
    replica.Step(cluster, b.update, t);
    ASSERT_TRUE(SameBits(expected_replica.sgd, replica.sgd)) << "round " << t;
    ASSERT_TRUE(SameBits(expected_replica.adamw, replica.adamw)) << "round " << t;
  }
}

std::vector<std::string> AllButTheReference() {
  std::vector<std::string> names = Backends();
  std::erase(names, "reference");
  return names;
}

class BackendConformance : public ::testing::TestWithParam<std::string> {};

TEST_P(BackendConformance, RunsTheSameJobAsTheReference) {
  for (const char* codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc:density=0.001,cells=8",
                            "tagc:density=0.05,cells=16", "tagc:density=0.05,cells=16,form=sketch",
                            "tagc:density=0.1,cells=32", "tagc:density=0.1,cells=8,form=sketch,slack=0.7"}) {
    for (const Gradient& gradient : kGradients) {
      for (uint64_t elements : {1u, 63u, 65u, 1025u, 70'001u}) {
        SCOPED_TRACE(std::string(codec) + ", " + gradient.name + ", " + std::to_string(elements) + " elements");
        ClusterOptions options;
        options.codec = codec;
        options.workers = 3;
        options.elements = elements;
        options.run_elements = 4096;
        options.seed = 5;
        ExpectSameJob(options, GetParam(), gradient);
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendConformance, ::testing::ValuesIn(AllButTheReference()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);

}  // namespace
}  // namespace gradwire::testing
