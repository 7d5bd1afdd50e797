// Sums at their limits. For every codec, up to 1,024 workers and values up to the largest float32: the update frame
// holds the exact sum of what the frames carry, or a part of the system has refused a value and named its tensor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "common/codec/powersgd/arithmetic.h"
#include "common/codec/powersgd/matrices.h"
#include "common/codec/select/select.h"
#include "common/job/round_mode.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

constexpr uint64_t kSide = 16;
constexpr uint64_t kElements = kSide * kSide;
constexpr uint32_t kDifferent = 4;  // frames, of which those of all other workers are copies
constexpr float kLearningRate = 0.5f;
constexpr float kOrdinary = 100.0f;  // up to here nothing is refused
constexpr float kLargest = std::numeric_limits<float>::max();

enum class Signs { kSame, kByWorker, kByElement };

float ValueOf(float magnitude, Signs signs, uint32_t worker, uint64_t element) {
  const bool negative =
      (signs == Signs::kByWorker && worker % 2 == 1) || (signs == Signs::kByElement && element % 2 == 1);
  const float part = element % 4 == 3 ? 0.75f : 1.0f;
  return (negative ? -magnitude : magnitude) * part;
}

v1::JobSpec SpecOf(const std::string& codec, uint32_t workers) {
  v1::JobSpec spec;
  spec.set_name("limits");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec(codec);
  spec.set_max_workers(workers);
  spec.set_run_elements(64);
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  tensor->add_shape(kSide);
  tensor->add_shape(kSide);
  return spec;
}

// A bucket of a job with so many workers, all of whom push such values in one step.
class Step {
 public:
  Step(const std::string& codec, uint32_t workers, float magnitude, Signs signs)
      : name_(codec), workers_(workers), magnitude_(magnitude), signs_(signs) {
    auto job = Job::Make(SpecOf(codec, workers));
    EXPECT_TRUE(job.ok()) << job.status();
    job_ = std::make_unique<Job>(*std::move(job));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 1));
    backend_ = *kernels::MakeBackend("cpu");
    absl::StatusOr<std::unique_ptr<Codec>> made = MakeCodec({job_.get(), &slice(), backend_.get()});
    if (made.ok()) {
      codec_ = *std::move(made);
    } else {
      EXPECT_TRUE(codec.find("cells=8") != std::string::npos && workers > 127) << made.status();
    }
  }

  // Whether the step was made, by a right sum. Not where a value was refused, which ends it.
  bool Make() {
    if (codec_ == nullptr) return false;
    RoundPlan plan = codec_->InitialPlan();
    for (uint64_t round = 0; round < 2; ++round) {
      if (!Encode(round, plan)) return false;
      const std::optional<Update> all = Merge(round, plan);
      if (!all) return false;
      if (job_->two_phase()) {
        CheckFactors(round, *all);
      } else {
        CheckSums(round, plan, *all);
      }
      plan = all->next;
    }
    return true;
  }

 private:
  const BucketLayout& slice() const { return layout_->at(0, 0); }
  FrameIdentity IdentityOf(uint64_t round, uint64_t worker) const {
    return {0, 0, round, worker, {&kLearningRate, 1}, worker};
  }
  uint32_t different() const { return std::min(workers_, kDifferent); }
  uint32_t Copies(uint32_t frame) const { return (workers_ - frame + different() - 1) / different(); }
  std::string What() const {
    return name_ + ", " + std::to_string(workers_) + " workers, values of " + std::to_string(magnitude_) + ", signs " +
           std::to_string(static_cast<int>(signs_));
  }
  bool Refused(const absl::Status& why) const {
    EXPECT_NE(why.message().find("tensor 'w'"), std::string::npos) << What() << ": " << why;
    EXPECT_GT(magnitude_, kOrdinary) << What() << ": " << why;
    return false;
  }

  bool Encode(uint64_t round, const RoundPlan& plan) {
    frames_.clear();
    formed_.assign(different(), std::vector<float>(kElements));
    for (uint32_t w = 0; w < different(); ++w) {
      for (uint64_t i = 0; i < kElements; ++i) formed_[w][i] = ValueOf(magnitude_, signs_, w, i);
    }
    kept_ = formed_;
    for (uint32_t w = 0; w < different(); ++w) {
      std::vector<float> velocity(kElements);
      const Selection selection = SelectThreshold(*codec_, round, kept_[w], *backend_);
      std::vector<RunInput> runs;
      for (const uint64_t begin : slice().run_begin) {
        if (begin == kElements) break;
        runs.push_back({formed_[w].data() + begin, kept_[w].data() + begin, selection});
        runs.back().velocity = codec_->velocity() ? velocity.data() + begin : nullptr;
      }
      absl::StatusOr<EncodedFrame> frame = codec_->NewEncoder()->Encode(IdentityOf(round, w), plan, runs);
      if (!frame.ok()) return Refused(frame.status());
      frames_.push_back(*std::move(frame));
    }
    return true;
  }

  absl::Status Add(const EncodedFrame& frame, Accumulator* accumulator) const {
    const ParsedFrame parsed = ParseAll(frame);
    for (const wire::Segment& s : parsed.segments) {
      if (s.type == wire::SegmentType::kLearningRates) continue;
      if (absl::Status added = accumulator->Add(s); !added.ok()) return added;
    }
    return absl::OkStatus();
  }

  Update Finish(uint64_t round, const RoundPlan& plan, uint32_t contributors, Accumulator* accumulator) const {
    const absl::StatusOr<UpdateFrame> update = accumulator->Finish(IdentityOf(round, 0), contributors);
    EXPECT_TRUE(update.ok()) << update.status();
    absl::StatusOr<Update> decoded = DecodeUpdate(update->chunks, *job_, slice(), plan);
    EXPECT_TRUE(decoded.ok()) << What() << ": " << decoded.status();
    return decoded.ok() ? *std::move(decoded) : Update();
  }

  std::optional<Update> Merge(uint64_t round, const RoundPlan& plan) {
    const std::unique_ptr<Accumulator> accumulator = codec_->NewAccumulator();
    accumulator->Open(round, plan);
    for (uint32_t w = 0; w < workers_; ++w) {
      const absl::Status added = Add(frames_[w % different()], accumulator.get());
      if (!added.ok()) {
        Refused(added);
        return std::nullopt;
      }
    }
    return Finish(round, plan, workers_, accumulator.get());
  }

  // What a frame carries is the update of a round that has no other.
  void CheckSums(uint64_t round, const RoundPlan& plan, const Update& all) const {
    if (round == 0) return;
    std::vector<long double> expected(kElements);
    std::vector<bool> known(kElements, true);
    double largest = 0;
    for (const uint32_t position : all.deferred) known[position] = false;
    for (uint32_t w = 0; w < different(); ++w) {
      const std::unique_ptr<Accumulator> accumulator = codec_->NewAccumulator();
      accumulator->Open(round, plan);
      ASSERT_TRUE(Add(frames_[w], accumulator.get()).ok()) << What();
      const Update alone = Finish(round, plan, 1, accumulator.get());
      const std::vector<double> carried = SumsOf(alone, slice());
      for (const uint32_t position : alone.deferred) known[position] = false;
      for (uint64_t i = 0; i < kElements; ++i) {
        expected[i] += static_cast<long double>(carried[i]) * Copies(w);
        largest = std::max(largest, std::abs(carried[i]));
      }
      CheckCarried(w, carried, known);
    }
    const std::vector<double> sums = SumsOf(all, slice());
    for (uint64_t i = 0; i < kElements; ++i) {
      if (!known[i]) continue;
      const long double tolerance = static_cast<long double>(1e-5 * largest + 1e-12) * workers_;
      ASSERT_LE(std::fabs(static_cast<long double>(sums[i]) - expected[i]), tolerance)
          << What() << ", element " << i << ": the sum is " << sums[i] << ", that of the frames "
          << static_cast<double>(expected[i]);
    }
  }

  // Together with the residual that is what the worker had; without one, that to the precision of its values.
  void CheckCarried(uint32_t w, const std::vector<double>& carried, const std::vector<bool>& known) const {
    const CodecTraits traits = TraitsOf(name_);
    const bool rounds = name_.starts_with("zen") || name_.starts_with("adaptive") || name_ == "dense:fp32";
    if (!traits.keeps_rest && !rounds) return;
    for (uint64_t i = 0; i < kElements; ++i) {
      if (!known[i]) continue;
      const double had = static_cast<double>(formed_[w][i]);
      const double rest = codec_->uses_residual() ? static_cast<double>(kept_[w][i]) : 0;
      const double tolerance = static_cast<double>(magnitude_) * (traits.keeps_rest ? 2e-5 : 0x1p-8) + 0x1p-44;
      ASSERT_LE(std::abs(carried[i] + rest - had), tolerance)
          << What() << ", element " << i << ": of " << had << " the frame carries " << carried[i] << ", " << rest
          << " is left";
    }
  }

  // The mean of the frames' factors. P is made orthonormal then: its first column is that of the mean, with norm 1.
  void CheckFactors(uint64_t round, const Update& all) const {
    const std::vector<powersgd::Matrix> matrices = powersgd::MatricesOf(*job_, slice());
    ASSERT_EQ(matrices.size(), 1u);
    const powersgd::Factor sent = powersgd::FactorSentIn(round);
    std::vector<long double> exact(powersgd::SizeOf(matrices, sent));
    for (uint32_t w = 0; w < different(); ++w) {
      const ParsedFrame parsed = ParseAll(frames_[w]);
      for (const wire::Segment& s : parsed.segments) {
        if (s.type != wire::SegmentType::kFactors) continue;
        for (uint32_t i = 0; i < s.count; ++i) {
          float value;
          std::memcpy(&value, s.data + 4 * size_t{i}, sizeof(value));
          exact[s.begin + i] += static_cast<long double>(value) * Copies(w);
        }
      }
    }
    std::vector<float> mean;
    double largest = 1e-12;
    for (const long double sum : exact) {
      mean.push_back(static_cast<float>(sum / workers_));
      largest = std::max(largest, std::abs(static_cast<double>(mean.back())));
    }
    size_t compared = mean.size();
    if (sent == powersgd::Factor::kP) {
      compared = kSide;
      powersgd::Orthonormalize(mean.data(), matrices[0].rows, matrices[0].rank);
      largest = 1;
    }
    ASSERT_EQ(all.next.factors.size(), mean.size());
    for (size_t i = 0; i < compared; ++i) {
      ASSERT_NEAR(static_cast<double>(all.next.factors[i]), static_cast<double>(mean[i]), 1e-4 * largest)
          << What() << ", round " << round << ", factor value " << i;
    }
  }

  const std::string name_;
  const uint32_t workers_;
  const float magnitude_;
  const Signs signs_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Codec> codec_;
  std::vector<EncodedFrame> frames_;
  std::vector<std::vector<float>> formed_;  // what each worker had before it encoded
  std::vector<std::vector<float>> kept_;    // and after
};

class SumLimits : public ::testing::TestWithParam<std::string> {};

TEST_P(SumLimits, SumsAreRightOrRefusedByName) {
  int made = 0;
  for (const uint32_t workers : {1u, 2u, 3u, 4u, 8u, 9u, 64u, 1024u}) {
    for (const float magnitude :
         {1e-3f, kOrdinary, 511.0f, 20'000.0f, 65'504.0f, 65'536.0f, 70'000.0f, std::nextafter(131'072.0f, 0.0f), 2e5f,
          std::nextafter(262'144.0f, 0.0f), 262'144.0f, 1e10f, 1e30f, kLargest}) {
      for (const Signs signs : {Signs::kSame, Signs::kByWorker, Signs::kByElement}) {
        made += Step(GetParam(), workers, magnitude, signs).Make() ? 1 : 0;
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(made, 0);
}

INSTANTIATE_TEST_SUITE_P(Codecs, SumLimits, ::testing::ValuesIn(AllCodecs()),
                         [](const auto& info) { return NameOf(info.param, "cpu"); });

// What is pending at the limit and beyond, though no gradient is, leaves over several rounds: every frame is merged.
class PendingLimits : public ::testing::TestWithParam<std::string> {};

TEST_P(PendingLimits, NothingIsRefusedOrLost) {
  constexpr uint64_t kFew = 96;
  for (const uint32_t max_workers : {2u, 1024u}) {
    const float limit = max_workers == 2 ? 262'144.0f : 512.0f;
    // The first one rounds to the limit as bfloat16 and as binary16, the last one is beyond binary16 in any job.
    for (const float pending : {std::nextafter(limit, 0.0f), limit, 1.5f * limit, 70'000.0f + 3 * limit}) {
      Cluster cluster({.codec = GetParam(), .workers = 2, .max_workers = max_workers, .elements = kFew});
      const auto push = [&](uint32_t worker, uint64_t round, std::vector<float>* out) {
        for (uint64_t i = 0; i < kFew && round <= 2; ++i) {
          const bool large = i % 3 == 0;
          const float magnitude = !large ? 0.25f : round == 1 ? pending : 0.0f;  // float32 has no digits for both
          (*out)[i] = (i + worker) % 2 == 0 ? magnitude : -magnitude;
        }
      };
      for (uint64_t rounds = 0; rounds < 40; ++rounds) cluster.Round(push);
      const double tolerance = TraitsOf(GetParam()).rounding * static_cast<double>(pending) + 40 * kFew * 0x1p-44;
      EXPECT_LE(cluster.LargestLoss(), tolerance) << pending << " of " << max_workers << " workers";
    }
  }
}

std::vector<std::string> WithResidual() {
  std::vector<std::string> codecs = CodecsWith([](const CodecTraits& traits) { return traits.keeps_rest; });
  std::erase_if(codecs, [](const std::string& codec) {
    return codec == "dense:fp32" || codec.starts_with("zen") || codec == "adaptive" ||
           codec.find("cells=8") != std::string::npos;  // which are for fewer workers
  });
  return codecs;
}

INSTANTIATE_TEST_SUITE_P(Codecs, PendingLimits, ::testing::ValuesIn(WithResidual()),
                         [](const auto& info) { return NameOf(info.param, "cpu"); });

TEST(PendingLimit, WhatIsBeyondLeaves) {
  for (const char* codec : {"dense:bf16", "fp16", "topk:density=1", "topk:density=1,values=fp16",
                            "topk:density=1,values=int8", "dgc:density=1,momentum=0"}) {
    Cluster cluster({.codec = codec, .workers = 1, .max_workers = 1024, .elements = 8});
    for (int round = 0; round < 5; ++round) {
      cluster.Round(
          [](uint32_t, uint64_t round, std::vector<float>* out) { out->assign(8, round == 1 ? -1900.0f : 0.0f); });
    }
    EXPECT_EQ(cluster.applied(), std::vector<double>(8, -1900)) << codec;
  }
}

}  // namespace
}  // namespace gradwire::testing
