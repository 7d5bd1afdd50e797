// Applying update frames: which runs, which coefficients, and the same bits on every shard count.
#include "common/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

v1::JobSpec Spec(v1::OptimizerKind kind, float weight_decay, float momentum = 0) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(kind);
  for (int g = 0; g < 2; ++g) {
    auto* group = spec.mutable_optimizer()->add_groups();
    group->set_weight_decay(g == 0 ? weight_decay : 0);
    group->set_momentum(momentum);
  }
  spec.set_codec("tagc:density=0.1,cells=16");
  spec.set_run_elements(64);
  for (int t = 0; t < 3; ++t) {
    auto* tensor = spec.add_tensors();
    tensor->set_name("t" + std::to_string(t));
    tensor->add_shape(200 + 37 * static_cast<uint64_t>(t));
    tensor->set_group(t == 1 ? 1 : 0);
  }
  return spec;
}

// Model and optimizer state of a whole job, and a gradient of integers with one exponent per (tensor, run).
struct Model {
  std::vector<std::vector<float>> p, m, v;
  explicit Model(const Job& job) {
    std::mt19937_64 random(9);
    std::normal_distribution<float> normal;
    for (const Tensor& t : job.tensors()) {
      p.emplace_back(t.elements);
      for (float& x : p.back()) x = normal(random);
      m.emplace_back(t.elements, 0.0f);
      v.emplace_back(t.elements, 0.0f);
    }
  }
  bool operator==(const Model&) const = default;
};

int32_t SumAt(uint32_t tensor, uint64_t element, uint64_t round) {
  std::mt19937 random(static_cast<uint32_t>(tensor * 1'000'003 + element * 31 + round));
  return random() % 4 == 0 ? static_cast<int32_t>(random() % 401) - 200 : 0;
}
int8_t ExponentAt(uint32_t tensor, uint64_t offset) {
  return static_cast<int8_t>(-8 - static_cast<int>((offset / 64 + tensor) % 5));
}

// How a dense body lies in memory: in parts of so many elements, so many bytes behind an address of floats.
struct DenseForm {
  uint32_t part = 77;  // parts do not end where runs do
  size_t offset = 0;
};

Update UpdateFor(const BucketLayout& layout, uint64_t round, Update::Body body, DenseForm form = {}) {
  Update u;
  u.round = round;
  u.contributors = 3;
  u.learning_rates = {0.125f, 0.03f};
  u.body = body;
  std::vector<int32_t> integers;
  std::vector<float> floats;
  for (size_t r = 0; r < layout.runs.size(); ++r) {
    const Run& run = layout.runs[r];
    u.exponents.push_back(ExponentAt(run.tensor, run.offset));
    for (uint32_t i = 0; i < run.length; ++i) {
      const int32_t sum = SumAt(run.tensor, run.offset + i, round);
      if (body == Update::Body::kDenseInt) {
        integers.push_back(sum);
      } else if (body == Update::Body::kDenseFloat) {
        floats.push_back(kernels::MeanOfInteger(sum, kernels::PowerOfTwo(u.exponents[r]), 3));
      } else if (sum != 0) {
        u.positions.push_back(static_cast<uint32_t>(layout.run_begin[r] + i));
        if (body == Update::Body::kSparse) {
          u.integers.push_back(sum);
        } else {
          u.values.push_back(kernels::MeanOfInteger(sum, kernels::PowerOfTwo(u.exponents[r]), 3));
        }
      }
    }
  }
  const bool dense = body == Update::Body::kDenseInt || body == Update::Body::kDenseFloat;
  for (uint64_t begin = 0; dense && begin < layout.elements; begin += form.part) {
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(form.part, layout.elements - begin));
    const uint8_t* values = body == Update::Body::kDenseInt ? reinterpret_cast<const uint8_t*>(integers.data() + begin)
                                                            : reinterpret_cast<const uint8_t*>(floats.data() + begin);
    std::vector<uint8_t> memory(form.offset + size_t{4} * count);
    std::copy_n(values, size_t{4} * count, memory.begin() + static_cast<ptrdiff_t>(form.offset));
    u.dense.push_back({begin, count, Bytes::FromVector(std::move(memory)).Slice(form.offset, size_t{4} * count)});
  }
  return u;
}

Model Train(const v1::JobSpec& spec, uint32_t shards, Update::Body body, DenseForm form = {}) {
  const Job job = *Job::Make(spec);
  const Layout layout = *Layout::Make(job, shards);
  auto backend = *kernels::MakeBackend("cpu");
  Model model(job);
  for (uint64_t round = 1; round <= 5; ++round) {
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      for (uint32_t s = 0; s < shards; ++s) {
        const BucketLayout& at = layout.at(b, s);
        std::vector<RunState> runs;
        for (const auto& r : at.runs) {
          RunState state = {&model.p[r.tensor][r.offset], nullptr, nullptr};
          if (job.moments() >= 1) state.first_moment = &model.m[r.tensor][r.offset];
          if (job.moments() >= 2) state.second_moment = &model.v[r.tensor][r.offset];
          runs.push_back(state);
        }
        const absl::Status status = ApplyUpdate(job, at, UpdateFor(at, round, body, form), runs, *backend);
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
  return model;
}

class OptimizerKinds : public ::testing::TestWithParam<std::tuple<v1::OptimizerKind, float, float>> {
 protected:
  v1::JobSpec spec() const { return Spec(std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())); }
};

TEST_P(OptimizerKinds, ShardCountDoesNotChangeABit) {
  const Model one = Train(spec(), 1, Update::Body::kSparse);
  EXPECT_NE(one, Model(*Job::Make(spec())));
  for (uint32_t shards : {2u, 3u, 5u}) EXPECT_EQ(Train(spec(), shards, Update::Body::kSparse), one) << shards;
}

TEST_P(OptimizerKinds, SparseAndDenseBodiesGiveTheSameBits) {
  const Model sparse = Train(spec(), 2, Update::Body::kSparse);
  EXPECT_EQ(Train(spec(), 2, Update::Body::kDenseInt), sparse);
  EXPECT_EQ(Train(spec(), 2, Update::Body::kDenseFloat), sparse);
  EXPECT_EQ(Train(spec(), 2, Update::Body::kSparseFloat), sparse);
}

// Means are read where they lie, or copied first.
TEST_P(OptimizerKinds, HowADenseBodyLiesDoesNotChangeABit) {
  const Model sparse = Train(spec(), 2, Update::Body::kSparse);
  for (uint32_t part : {1u, 64u, 4096u})
    for (size_t offset : {size_t{0}, size_t{1}, size_t{4}})
      EXPECT_EQ(Train(spec(), 2, Update::Body::kDenseFloat, {part, offset}), sparse) << part << ", " << offset;
}

INSTANTIATE_TEST_SUITE_P(
    All, OptimizerKinds,
    ::testing::Values(std::tuple{v1::OPTIMIZER_SGD, 0.0f, 0.0f}, std::tuple{v1::OPTIMIZER_SGD, 0.01f, 0.9f},
                      std::tuple{v1::OPTIMIZER_ADAMW, 0.1f, 0.0f}, std::tuple{v1::OPTIMIZER_LION, 0.1f, 0.0f},
                      std::tuple{v1::OPTIMIZER_STEP, 0.0f, 0.0f}, std::tuple{v1::OPTIMIZER_STEP, 0.1f, 0.0f}));

TEST(ApplyUpdate, UsesTheLearningRateAndDecayOfEachGroup) {
  const v1::JobSpec spec = Spec(v1::OPTIMIZER_STEP, 0.5f);
  const Job job = *Job::Make(spec);
  const Model before(job);
  const Layout layout = *Layout::Make(job, 1);
  auto backend = *kernels::MakeBackend("cpu");
  Model after(job);
  const BucketLayout& at = layout.at(0, 0);
  std::vector<RunState> runs;
  for (const auto& r : at.runs) runs.push_back({&after.p[r.tensor][r.offset], nullptr, nullptr});
  ASSERT_TRUE(ApplyUpdate(job, at, UpdateFor(at, 1, Update::Body::kSparse), runs, *backend).ok());
  for (uint32_t t = 0; t < 3; ++t) {
    for (size_t i = 0; i < before.p[t].size(); ++i) {
      const double mean = std::ldexp(SumAt(t, i, 1), ExponentAt(t, i / 64 * 64)) / 3;
      const double p = before.p[t][i];
      const double expected = t == 1 ? p - 0.03 * mean : p - 0.125 * (mean + 0.5 * p);
      ASSERT_NEAR(after.p[t][i], expected, 1e-6) << "tensor " << t << ", element " << i;
    }
  }
}

TEST(ApplyUpdate, OfPairsIsTheDenseStepAlsoWhereARateOrAParameterIsMinusZero) {
  const Job job = *Job::Make(Spec(v1::OPTIMIZER_SGD, 0.0f));
  const Layout layout = *Layout::Make(job, 1);
  auto backend = *kernels::MakeBackend("cpu");
  const BucketLayout& at = layout.at(0, 0);
  for (const float rate : {0.0f, -0.0f, 0.1f}) {
    std::vector<Model> models;
    for (const Update::Body body : {Update::Body::kSparseFloat, Update::Body::kDenseFloat}) {
      Model& model = models.emplace_back(job);
      std::vector<RunState> runs;
      for (const auto& r : at.runs) runs.push_back({&model.p[r.tensor][r.offset], nullptr, nullptr});
      for (auto& tensor : model.p) std::fill(tensor.begin(), tensor.end(), -0.0f);
      Update update = UpdateFor(at, 1, body);
      std::fill(update.learning_rates.begin(), update.learning_rates.end(), rate);
      ASSERT_TRUE(ApplyUpdate(job, at, update, runs, *backend).ok());
    }
    for (uint32_t t = 0; t < 3; ++t) {
      for (size_t i = 0; i < models[0].p[t].size(); ++i)
        ASSERT_EQ(std::signbit(models[0].p[t][i]), std::signbit(models[1].p[t][i])) << "rate " << rate << ", " << i;
    }
  }
}

TEST(ApplyUpdate, DoesNothingWhereNothingWasSent) {
  const Job job = *Job::Make(Spec(v1::OPTIMIZER_ADAMW, 0.1f));
  const Layout layout = *Layout::Make(job, 1);
  auto backend = *kernels::MakeBackend("cpu");
  const BucketLayout& at = layout.at(0, 0);
  const Model before(job);
  for (int which = 0; which < 3; ++which) {
    Model model(job);
    std::vector<RunState> runs;
    for (const auto& r : at.runs)
      runs.push_back({&model.p[r.tensor][r.offset], &model.m[r.tensor][r.offset], &model.v[r.tensor][r.offset]});
    Update u = UpdateFor(at, which == 0 ? 0 : 1, Update::Body::kSparse);
    if (which == 1) u.contributors = 0;
    if (which == 2) u.body = Update::Body::kEmpty;
    EXPECT_TRUE(ApplyUpdate(job, at, u, runs, *backend).ok());
    EXPECT_EQ(model, before);
  }
}

TEST(ApplyUpdate, RefusesWhatDoesNotFit) {
  const Job job = *Job::Make(Spec(v1::OPTIMIZER_ADAMW, 0.1f));
  const Layout layout = *Layout::Make(job, 1);
  auto backend = *kernels::MakeBackend("cpu");
  const BucketLayout& at = layout.at(0, 0);
  Model model(job);
  std::vector<RunState> runs;
  for (const auto& r : at.runs)
    runs.push_back({&model.p[r.tensor][r.offset], &model.m[r.tensor][r.offset], &model.v[r.tensor][r.offset]});
  Update u = UpdateFor(at, 1, Update::Body::kSparse);
  u.exponents[0] = kUncalibrated;
  EXPECT_FALSE(ApplyUpdate(job, at, u, runs, *backend).ok());
  u = UpdateFor(at, 1, Update::Body::kSparse);
  u.learning_rates.pop_back();
  EXPECT_FALSE(ApplyUpdate(job, at, u, runs, *backend).ok());
  u = UpdateFor(at, 1, Update::Body::kSparse);
  EXPECT_FALSE(ApplyUpdate(job, at, u, {runs.data(), runs.size() - 1}, *backend).ok());
  runs[1].second_moment = nullptr;
  EXPECT_FALSE(ApplyUpdate(job, at, u, runs, *backend).ok());
  EXPECT_EQ(model, Model(job)) << "refused before anything was written";
}

}  // namespace
}  // namespace gradwire
