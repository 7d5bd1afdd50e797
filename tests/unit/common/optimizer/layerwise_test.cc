// LAMB, LANS and clipping by the norm of all tensors: the same bits for any number of shards, and what the papers say.
#include "common/optimizer/layerwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "common/job/norms.h"
#include "common/optimizer/norm_sums.h"

namespace gradwire {
namespace {

constexpr uint64_t kRounds = 200;
constexpr double kRate = 0.01;
using Tensors = std::vector<std::vector<float>>;

v1::JobSpec LayeredSpec(v1::OptimizerKind kind, float clip = 0) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(kind);
  auto* group = spec.mutable_optimizer()->add_groups();
  group->set_weight_decay(0.015625f);
  group->set_beta1(0.875f);
  group->set_beta2(0.984375f);
  group->set_epsilon(0x1p-20f);
  spec.set_clip_norm(clip);
  spec.set_run_elements(64);
  spec.set_bucket_bytes(4096);
  uint64_t elements = 1500;  // over buckets, and shards
  for (const char* name : {"a", "b", "c", "zero", "scalar"}) {
    auto* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->add_shape(elements);
    elements = std::string(name) == "zero" ? 1 : elements / 2 + 13;
  }
  return spec;
}

struct LayeredModel {
  Tensors p, m, v;
  explicit LayeredModel(const Job& job) {
    std::mt19937_64 random(9);
    std::normal_distribution<float> normal;
    for (const Tensor& t : job.tensors()) {
      p.emplace_back(t.elements);
      if (t.name != "zero") {
        for (float& x : p.back()) x = normal(random);
      }
      m.emplace_back(t.elements, 0.0f);
      v.emplace_back(t.elements, 0.0f);
    }
  }
};

// Pulls parameters towards a fixed point, with noise.
Tensors Gradients(const Tensors& p, uint64_t round) {
  std::mt19937_64 random(round);
  std::normal_distribution<float> normal(0, 0.1f);
  Tensors g;
  for (const std::vector<float>& tensor : p) {
    g.emplace_back(tensor.size());
    for (size_t i = 0; i < tensor.size(); ++i) g.back()[i] = 0.25f * (tensor[i] - 0.5f) + normal(random);
  }
  return g;
}

Update UpdateOf(const BucketLayout& layout, const Tensors& gradients, uint64_t round) {
  Update u;
  u.round = round;
  u.contributors = 1;
  u.learning_rates = {static_cast<float>(kRate)};
  u.body = Update::Body::kDenseFloat;
  for (size_t r = 0; r < layout.runs.size(); ++r) {
    const Run& run = layout.runs[r];
    const auto* values = reinterpret_cast<const uint8_t*>(&gradients[run.tensor][run.offset]);
    u.dense.push_back({layout.run_begin[r], run.length, Bytes::Copy({values, size_t{4} * run.length})});
  }
  return u;
}

std::vector<RunState> RunsOf(const BucketLayout& layout, const Job& job, LayeredModel* model) {
  std::vector<RunState> runs;
  for (const Run& run : layout.runs) {
    RunState state = {&model->p[run.tensor][run.offset], nullptr, nullptr};
    if (job.moments() > 0) state.first_moment = &model->m[run.tensor][run.offset];
    if (job.moments() > 1) state.second_moment = &model->v[run.tensor][run.offset];
    runs.push_back(state);
  }
  return runs;
}

// What shards and their exchange do. `fragments`: every shard takes the norms of what it has for those of the tensor.
Tensors TrainLayers(const v1::JobSpec& spec, uint32_t shards, bool fragments = false) {
  const Job job = *Job::Make(spec);
  const Layout layout = *Layout::Make(job, shards);
  const NormSums table(&layout, job.tensors().size());
  const auto backend = *kernels::MakeBackend("cpu");
  LayeredModel model(job);
  const size_t per_tensor = NormsOf(job).size();
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const Tensors gradients = Gradients(model.p, round);
    std::vector<std::vector<Update>> updates(shards);
    for (uint32_t s = 0; s < shards; ++s) {
      for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
        updates[s].push_back(UpdateOf(layout.at(b, s), gradients, round));
        updates[s].back().norms.resize(per_tensor * TensorsOf(layout.at(b, s)).size());
      }
    }
    size_t done = 0;
    for (size_t phase = 0; phase < NormPhases(job).size(); ++phase) {
      const size_t count = NormPhases(job)[phase].size();
      std::vector<ShardSquares> of(shards);
      for (uint32_t s = 0; s < shards; ++s) {
        of[s].runs.resize(count * table.runs(s));
        for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
          const BucketLayout& at = layout.at(b, s);
          const auto squares = SquaresOfPhase(job, at, updates[s][b], RunsOf(at, job, &model), phase);
          EXPECT_TRUE(squares.ok()) << squares.status();
          for (size_t k = 0; k < count; ++k) {
            std::copy_n(squares->begin() + static_cast<ptrdiff_t>(k * at.runs.size()), at.runs.size(),
                        of[s].runs.begin() + static_cast<ptrdiff_t>(k * table.runs(s) + table.first_run(b, s)));
          }
        }
        // As they travel.
        of[s] = *table.Decode(s, table.Encode(s, of[s], count), count);
      }
      for (uint32_t s = 0; s < shards; ++s) {
        std::vector<ShardSquares> heard = of;
        for (uint32_t other = 0; fragments && other < shards; ++other) {
          if (other != s) heard[other].runs.assign(heard[other].runs.size(), 0);
        }
        const std::vector<double> sums = table.Add(heard, count);
        for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
          Update& update = updates[s][b];
          if (phase == 0 && ClipsNorm(job)) {
            update.mean_square = 0;
            for (const double sum : sums) *update.mean_square += sum;
          }
          const std::vector<uint32_t> tensors = TensorsOf(layout.at(b, s));
          for (size_t t = 0; t < tensors.size(); ++t) {
            std::copy_n(&sums[tensors[t] * count], count, &update.norms[t * per_tensor + done]);
          }
        }
      }
      done += count;
    }
    for (uint32_t s = 0; s < shards; ++s) {
      for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
        const BucketLayout& at = layout.at(b, s);
        const absl::Status applied = ApplyUpdate(job, at, updates[s][b], RunsOf(at, job, &model), *backend);
        EXPECT_TRUE(applied.ok()) << applied;
      }
    }
  }
  return model.p;
}

// The definitions, in float64, over whole tensors.
std::vector<std::vector<double>> Reference(const v1::JobSpec& spec) {
  const Job job = *Job::Make(spec);
  const LayeredModel start(job);
  const auto& group = job.spec().optimizer().groups(0);
  const double b1 = group.beta1(), b2 = group.beta2(), eps = group.epsilon(), wd = group.weight_decay();
  const double lr = static_cast<float>(kRate);
  std::vector<std::vector<double>> x(start.p.size()), m(start.p.size()), v(start.p.size());
  for (size_t t = 0; t < x.size(); ++t) {
    x[t].assign(start.p[t].begin(), start.p[t].end());
    m[t].resize(x[t].size());
    v[t].resize(x[t].size());
  }
  const auto norm = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return std::sqrt(sum);
  };
  for (uint64_t round = 1; round <= kRounds; ++round) {
    Tensors rounded;
    for (const auto& tensor : x) rounded.emplace_back(tensor.begin(), tensor.end());
    const Tensors gradients = Gradients(rounded, round);
    double all = 0;
    for (const auto& g : gradients)
      for (const float value : g) all += static_cast<double>(value) * static_cast<double>(value);
    const double clip = spec.clip_norm() == 0 ? 1 : std::min(1.0, spec.clip_norm() / (std::sqrt(all) + 1e-6));
    const double c1 = 1 - std::pow(b1, static_cast<double>(round)), c2 = 1 - std::pow(b2, static_cast<double>(round));
    for (size_t t = 0; t < x.size(); ++t) {
      const size_t n = x[t].size();
      std::vector<double> g(n), of_moment(n), of_gradient(n);
      for (size_t i = 0; i < n; ++i) g[i] = clip * static_cast<double>(gradients[t][i]);
      const bool lans = job.spec().optimizer().kind() == v1::OPTIMIZER_LANS;
      if (lans) {
        const double length = norm(g);
        for (double& value : g) value /= length + eps;
      }
      for (size_t i = 0; i < n; ++i) {
        m[t][i] = b1 * m[t][i] + (1 - b1) * g[i];
        v[t][i] = b2 * v[t][i] + (1 - b2) * g[i] * g[i];
        const double root = std::sqrt(v[t][i] / c2) + eps;
        of_moment[i] = m[t][i] / c1 / root + wd * x[t][i];
        of_gradient[i] = g[i] / root + wd * x[t][i];
      }
      const auto ratio = [&](const std::vector<double>& direction) {
        const double of_x = norm(x[t]), of_d = norm(direction);
        return of_x > 0 && of_d > 0 ? of_x / of_d : 1;
      };
      const double along_moment = ratio(of_moment), along_gradient = ratio(of_gradient);
      for (size_t i = 0; i < n; ++i) {
        x[t][i] -= lans ? lr * (b1 * along_moment * of_moment[i] + (1 - b1) * along_gradient * of_gradient[i])
                        : lr * along_moment * of_moment[i];
      }
    }
  }
  return x;
}

// |a - b| / |b| over all tensors.
template <typename T>
double Distance(const Tensors& a, const std::vector<std::vector<T>>& b) {
  double difference = 0, size = 0;
  for (size_t t = 0; t < a.size(); ++t) {
    for (size_t i = 0; i < a[t].size(); ++i) {
      const double at = static_cast<double>(b[t][i]);
      difference += (static_cast<double>(a[t][i]) - at) * (static_cast<double>(a[t][i]) - at);
      size += at * at;
    }
  }
  return std::sqrt(difference / size);
}

class Layerwise : public ::testing::TestWithParam<std::pair<v1::OptimizerKind, float>> {
 protected:
  v1::JobSpec spec() const { return LayeredSpec(GetParam().first, GetParam().second); }
};

TEST_P(Layerwise, GivesTheSameBitsOnAnyNumberOfShards) {
  const Tensors one = TrainLayers(spec(), 1);
  EXPECT_NE(one, LayeredModel(*Job::Make(spec())).p);
  for (const uint32_t shards : {2u, 4u}) EXPECT_EQ(TrainLayers(spec(), shards), one) << shards;
}

TEST_P(Layerwise, FollowsItsDefinition) {
  const double distance = Distance(TrainLayers(spec(), 2), Reference(spec()));
  std::printf("relative distance to the reference in float64 after %d rounds: %.2g\n", static_cast<int>(kRounds),
              distance);
  EXPECT_LT(distance, 1e-6);
}

TEST_P(Layerwise, NormsOfFragmentsAreAnotherAlgorithm) {
  const Tensors right = TrainLayers(spec(), 1);
  const double distance = Distance(TrainLayers(spec(), 4, /*fragments=*/true), right);
  std::printf("relative distance with the norms of fragments: %.2g\n", distance);
  EXPECT_GT(distance, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Layerwise,
                         ::testing::Values(std::pair{v1::OPTIMIZER_LAMB, 0.0f}, std::pair{v1::OPTIMIZER_LAMB, 4.0f},
                                           std::pair{v1::OPTIMIZER_LANS, 0.0f}, std::pair{v1::OPTIMIZER_LANS, 4.0f}));

TEST(ClipNorm, ScalesTheMeanOfAllTensorsDown) {
  v1::JobSpec spec = LayeredSpec(v1::OPTIMIZER_SGD);
  const Tensors free = TrainLayers(spec, 1);
  spec.set_clip_norm(1e6f);
  EXPECT_EQ(TrainLayers(spec, 3), free) << "a norm that is never reached changes nothing";
  spec.set_clip_norm(0.5f);
  const Tensors clipped = TrainLayers(spec, 1);
  EXPECT_NE(clipped, free);
  EXPECT_EQ(TrainLayers(spec, 3), clipped);
}

TEST(ApplyUpdate, RefusesAnUpdateWithoutTheNormsThatItNeeds) {
  const Job job = *Job::Make(LayeredSpec(v1::OPTIMIZER_LAMB));
  const Layout layout = *Layout::Make(job, 1);
  const auto backend = *kernels::MakeBackend("cpu");
  LayeredModel model(job);
  const Tensors before = model.p;
  const Update update = UpdateOf(layout.at(0, 0), Gradients(model.p, 1), 1);
  EXPECT_EQ(ApplyUpdate(job, layout.at(0, 0), update, RunsOf(layout.at(0, 0), job, &model), *backend).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(model.p, before);
}

TEST(NormSums, RefusesWhatAShardWouldNotTell) {
  const Job job = *Job::Make(LayeredSpec(v1::OPTIMIZER_LAMB));
  const Layout layout = *Layout::Make(job, 2);
  const NormSums table(&layout, job.tensors().size());
  ShardSquares squares;
  squares.runs.assign(2 * table.runs(1), 1.0);
  const v1::NormSums good = table.Encode(1, squares, 2);
  ASSERT_TRUE(table.Decode(1, good, 2).ok());
  EXPECT_FALSE(table.Decode(1, good, 3).ok());
  v1::NormSums bad = good;
  bad.add_runs(1);
  EXPECT_FALSE(table.Decode(1, bad, 2).ok());
  bad = good;
  bad.set_runs(0, -1);
  EXPECT_FALSE(table.Decode(1, bad, 2).ok());
  bad = good;
  bad.add_totalled(99);
  bad.add_totals(1);
  bad.add_totals(1);
  EXPECT_FALSE(table.Decode(1, bad, 2).ok());
}

TEST(NormSums, SayWhetherARoundIsSkipped) {
  const auto skips = [](std::vector<v1::RoundFate> fates) {
    std::vector<ShardSquares> of(fates.size());
    for (size_t i = 0; i < fates.size(); ++i) of[i].fate = fates[i];
    return SkipsRound(of);
  };
  EXPECT_FALSE(skips({v1::FATE_UNSPECIFIED, v1::FATE_UNSPECIFIED}));
  EXPECT_TRUE(skips({v1::FATE_UNSPECIFIED, v1::FATE_NONFINITE}));
  EXPECT_TRUE(skips({v1::FATE_SKIPPED, v1::FATE_UNSPECIFIED}));
  EXPECT_FALSE(skips({v1::FATE_NONFINITE, v1::FATE_APPLIED})) << "what was agreed on stays";
}

TEST(NormSums, TakesTheTotalOfATensorThatIsKnown) {
  const Job job = *Job::Make(LayeredSpec(v1::OPTIMIZER_LAMB));
  const Layout layout = *Layout::Make(job, 2);
  const NormSums table(&layout, job.tensors().size());
  std::vector<ShardSquares> of(2);
  for (uint32_t s = 0; s < 2; ++s) of[s].runs.assign(table.runs(s), 1.0);
  std::vector<double> expected = table.Add(of, 1);
  of[1].totals[0] = {77};
  of[1] = *table.Decode(1, table.Encode(1, of[1], 1), 1);
  expected[0] = 77;
  EXPECT_EQ(table.Add(of, 1), expected);
}

}  // namespace
}  // namespace gradwire
