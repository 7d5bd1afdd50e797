// What a job means does not depend on the order in which its tensors are named.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/codec/select/select.h"
#include "common/job/round_mode.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

constexpr uint32_t kWorkers = 2;
constexpr int kRounds = 3;  // behind the one that calibrates
constexpr float kLearningRate = 0.25f;

using Sizes = std::vector<std::pair<std::string, uint64_t>>;
using Arrays = std::map<std::string, std::vector<float>>;  // by tensor

std::vector<float> GradientOf(const std::string& tensor, uint64_t elements, uint32_t worker, uint64_t round) {
  std::vector<float> g(elements);
  GaussianGradient(HashString(tensor), elements)(worker, round, &g);
  return g;
}

// A job of these tensors on one shard, a few rounds of it: the means of all rounds, one behind the other.
Arrays Train(const std::string& codec_spec, const Sizes& tensors) {
  v1::JobSpec spec;
  spec.set_name("order");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec(codec_spec);
  spec.set_max_workers(kWorkers);
  spec.set_run_elements(1024);
  spec.set_seed(3);
  for (const auto& [name, elements] : tensors) {
    spec.add_tensors()->set_name(name);
    for (const uint64_t n : SquarestShape(elements)) spec.mutable_tensors(spec.tensors_size() - 1)->add_shape(n);
  }
  const Job job = *Job::Make(spec);
  const Layout layout = *Layout::Make(job, 1);
  EXPECT_EQ(layout.bucket_count(), 1u);
  const BucketLayout& bucket = layout.at(0, 0);
  const auto backend = *kernels::MakeBackend("cpu");
  const auto codec = *MakeCodec({&job, &bucket, backend.get()});
  const auto encoder = codec->NewEncoder();
  const auto accumulator = codec->NewAccumulator();
  std::vector<Arrays> pending(kWorkers), velocity(kWorkers);
  for (uint32_t w = 0; w < kWorkers; ++w)
    for (const auto& [name, elements] : tensors) velocity[w][name] = pending[w][name] = std::vector<float>(elements);
  RoundPlan plan = codec->InitialPlan();
  Arrays means;
  for (uint64_t round = 0; round <= kRounds; ++round) {
    accumulator->Open(round, plan);
    for (uint32_t w = 0; w < kWorkers; ++w) {
      Arrays shown = pending[w];
      std::map<std::string, Selection> selections;
      for (const auto& [name, elements] : tensors) {
        const std::vector<float> g = GradientOf(name, elements, w, round);
        if (const auto rule = codec->velocity()) {
          AddVelocityToPending(g, *rule, velocity[w][name], shown[name]);
        } else {
          AddToPending(g, shown[name], *backend);
        }
        selections[name] = SelectThreshold(*codec, round, shown[name], *backend);
      }
      std::vector<RunInput> runs;
      for (const Run& run : bucket.runs) {
        const std::string& name = job.tensors()[run.tensor].name;
        float* const at = shown[name].data() + run.offset;
        runs.push_back({at, at, selections[name]});
        runs.back().velocity = velocity[w][name].data() + run.offset;
      }
      const FrameIdentity id = {0, 0, round, w + 1, {&kLearningRate, 1}, w + 1};
      const auto frame = encoder->Encode(id, plan, runs);
      EXPECT_TRUE(frame.ok()) << frame.status();
      if (CarriesValues(job, round) && codec->uses_residual()) pending[w] = shown;
      for (const wire::Segment& s : ParseAll(*frame).segments) {
        if (s.type == wire::SegmentType::kLearningRates) continue;
        EXPECT_TRUE(accumulator->Add(s).ok());
      }
    }
    const auto update = accumulator->Finish({0, 0, round, 0, {&kLearningRate, 1}, 0}, kWorkers);
    EXPECT_TRUE(update.ok()) << update.status();
    const auto decoded = DecodeUpdate(update->chunks, job, bucket, plan);
    EXPECT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(decoded->deferred.empty()) << "which elements a sketch cannot decode depends on their positions";
    plan = update->next;
    std::map<std::string, std::vector<float>> of_round;
    for (const auto& [name, elements] : tensors) of_round[name].resize(elements);
    for (uint32_t r = 0; r < bucket.runs.size(); ++r) {
      const Run& run = bucket.runs[r];
      decoded->MeanOfRun(bucket, r, of_round[job.tensors()[run.tensor].name].data() + run.offset);
    }
    for (const auto& [name, values] : of_round) means[name].insert(means[name].end(), values.begin(), values.end());
  }
  return means;
}

class TensorOrder : public ::testing::TestWithParam<std::string> {};

TEST_P(TensorOrder, DoesNotMatter) {
  const Sizes tensors = {{"a", 5000}, {"b", 300}, {"c", 2047}};
  const Arrays means = Train(GetParam(), tensors);
  EXPECT_NE(means.at("a"), std::vector<float>(means.at("a").size()));
  EXPECT_EQ(Train(GetParam(), {tensors[2], tensors[0], tensors[1]}), means);
  EXPECT_EQ(Train(GetParam(), {tensors[1], tensors[2], tensors[0]}), means);
}

INSTANTIATE_TEST_SUITE_P(Codecs, TensorOrder, ::testing::ValuesIn(AllCodecs()),
                         [](const auto& info) { return NameOf(info.param, "cpu"); });

}  // namespace
}  // namespace gradwire::testing
