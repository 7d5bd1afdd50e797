// Workers that give gradients by their rows beside workers that give them whole: the job is the same, to the bit.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/client/train.h"

namespace gradwire::testing {
namespace {

constexpr int kWorkers = 2;
constexpr int kSteps = 12;

struct RowsCase {
  JobCase job;
  const char* rounds = "sync";  // or bounded
  float decay = 0;
};

v1::JobSpec SpecOf(const std::string& name, const RowsCase& c) {
  v1::JobSpec spec = SpecOf(name, c.job, kWorkers);
  spec.mutable_optimizer()->mutable_groups(0)->set_weight_decay(c.decay);
  if (std::string(c.rounds) == "bounded") {
    spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(2);
  }
  return spec;
}

// Gradients of which most rows are 0; of tensors without rows, which are given whole, all.
void Thin(std::vector<std::vector<float>>* gradients, const Job& job, uint64_t step, int worker) {
  for (size_t t = 0; t < gradients->size(); ++t) {
    const std::vector<uint64_t>& shape = job.tensors()[t].shape;
    const uint64_t rows = shape.empty() ? 1 : shape[0];
    const uint64_t width = (*gradients)[t].size() / rows;
    for (uint64_t row = 0; row < rows; ++row) {
      if ((row * 7 + step + static_cast<uint64_t>(worker) + t) % 9 == 0) continue;
      std::fill_n((*gradients)[t].begin() + static_cast<ptrdiff_t>(row * width), width, 0.0f);
    }
  }
}

absl::Status StepByRows(Worker& worker, float rate) {
  const std::vector<float> rates = {rate};
  absl::Status status = worker.session().BeginRound(rates);
  const Job& job = worker.session().job();
  // Kept until the round has ended.
  std::vector<std::vector<int64_t>> rows(job.tensors().size());
  std::vector<std::vector<float>> values(job.tensors().size());
  for (uint32_t t = 0; t < job.tensors().size() && status.ok(); ++t) {
    const std::vector<float>& gradient = worker.gradients()[t];
    const std::vector<uint64_t>& shape = job.tensors()[t].shape;
    if (shape.empty() || t % 4 == 3) {
      status = worker.session().TensorReady(t, gradient.data());
      continue;
    }
    const size_t width = gradient.size() / shape[0];
    for (uint64_t row = 0; row < shape[0]; ++row) {
      const auto begin = gradient.begin() + static_cast<ptrdiff_t>(row * width);
      if (std::all_of(begin, begin + static_cast<ptrdiff_t>(width), [](float x) { return x == 0; })) continue;
      rows[t].push_back(static_cast<int64_t>(row));
      values[t].insert(values[t].end(), begin, begin + static_cast<ptrdiff_t>(width));
    }
    status = worker.session().RowsReady(t, {rows[t], values[t].data()});
  }
  return status.ok() ? worker.session().EndRound() : status;
}

std::set<std::string> Train(const v1::JobSpec& spec, Cluster& cluster, PullMode pull, bool by_rows) {
  std::vector<std::string> digests(kWorkers);
  InParallel(kWorkers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(cluster.addresses(), pull);
    ASSERT_TRUE(joined.ok()) << joined;
    const std::string first = worker.session().Digest();
    for (uint64_t step = 0; step < kSteps; ++step) {
      worker.FillApart(step);
      Thin(&worker.gradients(), worker.session().job(), step, w);
      const absl::Status stepped = by_rows && w == 0 ? StepByRows(worker, 0.1f) : worker.Step(0.1f);
      ASSERT_TRUE(stepped.ok()) << stepped;
    }
    ASSERT_TRUE(worker.session().Drain().ok());
    digests[w] = worker.session().Digest();
    EXPECT_NE(digests[w], first);
    EXPECT_EQ(worker.session().stats().not_included_frames, 0u);
    if (pull == PullMode::kMean) return;
    for (uint32_t s = 0; s < cluster.addresses().size(); ++s)
      EXPECT_EQ(worker.session().ShardDigests()[s], cluster.ParametersSha256(s, spec.name()));
  });
  return {digests.begin(), digests.end()};
}

class RowGradients : public ::testing::TestWithParam<RowsCase> {};

TEST_P(RowGradients, TrainAsWholeOnesDo) {
  const RowsCase& c = GetParam();
  for (const uint32_t shards : {1u, 3u}) {
    SCOPED_TRACE(absl::StrCat(shards, " shards"));
    Cluster cluster(shards, shards == 1 ? "inproc" : "tcp");
    const std::set<std::string> whole = Train(SpecOf("whole", c), cluster, c.job.pull, false);
    EXPECT_EQ(whole.size(), 1u);
    EXPECT_EQ(Train(SpecOf("rows", c), cluster, c.job.pull, true), whole);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RowGradients,
    ::testing::Values(RowsCase{{"ZenSgd", "zen", v1::OPTIMIZER_SGD}},
                      RowsCase{{"ZenSgdDecay", "zen", v1::OPTIMIZER_SGD}, "sync", 0.01f},
                      RowsCase{{"ZenSmall", "zen", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0, "", true}},
                      RowsCase{{"ZenParams", "zen:values=bf16", v1::OPTIMIZER_SGD, PullMode::kParams}},
                      RowsCase{{"ZenMean", "zen", v1::OPTIMIZER_NONE, PullMode::kMean}},
                      RowsCase{{"ZenClipped", "zen", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0.5f}},
                      RowsCase{{"ZenTwoWay", "zen", v1::OPTIMIZER_SGD, PullMode::kUpdate, 0, "onebit"}},
                      RowsCase{{"ZenBounded", "zen", v1::OPTIMIZER_SGD}, "bounded"},
                      RowsCase{{"AdaptiveAdamW", "adaptive", v1::OPTIMIZER_ADAMW}},
                      RowsCase{{"DenseAdamW", "dense:fp32", v1::OPTIMIZER_ADAMW}},
                      RowsCase{{"TopkSteps", "topk:density=0.1", v1::OPTIMIZER_STEP}},
                      RowsCase{{"TagcSteps", "tagc:density=0.1", v1::OPTIMIZER_STEP}}),
    [](const auto& param_info) { return param_info.param.job.name; });

}  // namespace
}  // namespace gradwire::testing
