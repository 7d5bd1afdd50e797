// Jobs with asynchronous rounds whose arithmetic is exact, in whatever order frames are merged: initial parameters,
// gradients and learning rate lie on a coarse grid, so in the end the parameters are the initial ones minus the rate
// times the sum of all that was pushed: with dense float32 to the last bit.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "tests/integration/client/cluster.h"

namespace gradwire::testing {

inline constexpr float kExactRate = 1.0f / 16;
inline constexpr int kRoundsToDrain = 80;  // of zeros, in which everything that waits in a residual leaves

inline v1::JobSpec AsyncSpec(const std::string& name, const std::string& codec, uint32_t workers) {
  v1::JobSpec spec = MakeSpec(name, codec, v1::OPTIMIZER_SGD, workers);
  spec.mutable_optimizer()->mutable_groups(0)->set_weight_decay(0);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  return spec;
}

// What every worker starts with.
inline void FillInitial(std::vector<std::vector<float>>& parameters) {
  std::mt19937 random(7);
  for (auto& tensor : parameters)
    for (float& x : tensor) x = static_cast<float>(static_cast<int>(random() % 1025) - 512) / 1024;
}

// A worker that remembers what it pushed.
class ExactWorker {
 public:
  ExactWorker(const v1::JobSpec& spec, int index) : worker_(spec, index), random_(static_cast<uint32_t>(index)) {
    FillInitial(worker_.parameters());
    for (const auto& gradient : worker_.gradients()) pushed_.emplace_back(gradient.size());
  }

  Worker& worker() { return worker_; }
  const std::vector<std::vector<double>>& pushed() const { return pushed_; }

  void Fill(bool zeros) {
    for (size_t t = 0; t < worker_.gradients().size(); ++t) {
      for (size_t i = 0; i < worker_.gradients()[t].size(); ++i) {
        const float value = zeros ? 0.0f : static_cast<float>(static_cast<int>(random_() % 129) - 64) / 64;
        worker_.gradients()[t][i] = value;
        pushed_[t][i] += value;
      }
    }
  }
  absl::Status Step(bool zeros = false) {
    Fill(zeros);
    return worker_.Step(kExactRate);
  }
  // Until nothing waits in the residual.
  absl::Status Drain() {
    for (int whole = 0; whole < kRoundsToDrain;) {
      const uint64_t before = worker_.session().stats().not_included_frames;
      const absl::Status status = Step(/*zeros=*/true);
      if (!status.ok()) return status;
      whole = worker_.session().stats().not_included_frames == before ? whole + 1 : 0;
    }
    return absl::OkStatus();
  }

 private:
  Worker worker_;
  std::mt19937 random_;
  std::vector<std::vector<double>> pushed_;
};

// How far parameters may lie from that. Where runs have exponents, a value beyond the range that the frame before
// announced (another worker's, which may have had almost nothing left) is cut on a grid so fine that adding it to a
// parameter rounds. A frame that is lost or merged twice moves a parameter by a step of the coarse grid, or more.
inline double RoundingOf(const v1::JobSpec& spec) {
  constexpr double kCoarseStep = kExactRate / 64;
  return spec.codec() == "dense:values=fp32" ? 0 : kCoarseStep / 64;
}

// A newcomer finds exactly what `workers` pushed.
inline void ExpectApplied(const v1::JobSpec& spec, const std::vector<std::string>& servers,
                          const std::vector<std::unique_ptr<ExactWorker>>& workers) {
  Worker reader(spec, 99);
  std::vector<std::vector<float>> initial = reader.parameters();
  FillInitial(initial);
  const absl::Status joined = reader.Join(servers, PullMode::kParams);
  ASSERT_TRUE(joined.ok()) << joined;
  for (size_t t = 0; t < initial.size(); ++t) {
    for (size_t i = 0; i < initial[t].size(); ++i) {
      double expected = initial[t][i];
      for (const auto& worker : workers) expected -= kExactRate * worker->pushed()[t][i];
      ASSERT_NEAR(reader.parameters()[t][i], expected, RoundingOf(spec)) << "tensor " << t << " element " << i;
    }
  }
}

}  // namespace gradwire::testing
