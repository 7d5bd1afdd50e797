// The worker's memory of gradients: taking in, sending, and getting back what was not merged.
#include "client/cpp/internal/gradients.h"

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "common/codec/update/update.h"
#include "common/wire/frame.h"
#include "tests/unit/client/one_tensor.h"

namespace gradwire::client {
namespace {

// The tensor has 300 elements in runs of 64.
class GradientStoreTest : public OneTensorTest {
 protected:
  void Prepare(const std::string& codec, v1::PushKind push = v1::PUSH_GRADIENT,
               v1::NonFinitePolicy policy = v1::NONFINITE_REFUSE) {
    v1::JobSpec spec = Spec(300, codec);
    spec.set_push(push);
    spec.set_nonfinite(policy);
    spec.set_run_elements(64);
    Make(spec);
    gradient_.resize(300);
    for (size_t i = 0; i < gradient_.size(); ++i) gradient_[i] = static_cast<float>(i % 100 + 1);  // exact in bfloat16
  }

  EncodedFrame Encode(uint64_t round) {
    const std::vector<float> rates = {0.1f};
    FrameIdentity id;
    id.round = round;
    id.learning_rates = rates;
    RoundPlan plan = codec_->InitialPlan();
    if (!plan.exponents.empty()) plan.exponents.assign(plan.exponents.size(), -10);
    auto frame = encoder_->Encode(id, plan, store_->InputsOf(slice()));
    EXPECT_TRUE(frame.ok()) << frame.status();
    return *std::move(frame);
  }

  // What a codec without residual would send, or what is pending, in tensor order.
  std::vector<float> Values() {
    const std::vector<RunInput> inputs = store_->InputsOf(slice());
    std::vector<float> values(300);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const gradwire::Run& run = slice().runs[i];
      const float* from = inputs[i].pending != nullptr ? inputs[i].pending : inputs[i].gradient;
      std::copy(from, from + run.length, values.begin() + static_cast<ptrdiff_t>(run.offset));
    }
    return values;
  }

  // What an element gets of a frame alone, which must be merged.
  float CarriedBy(const EncodedFrame& frame) {
    const uint64_t round = wire::ParseFrame(frame.chunks)->front().header.round;
    const std::unique_ptr<Accumulator> accumulator = codec_->NewAccumulator();
    accumulator->Open(round, frame.plan);
    const std::vector<wire::Chunk> chunks = *wire::ParseFrame(frame.chunks);
    for (const wire::Chunk& chunk : chunks) {
      for (const wire::Segment& s : chunk.segments) {
        if (s.type == wire::SegmentType::kLearningRates) continue;
        const absl::Status added = accumulator->Add(s);
        EXPECT_TRUE(added.ok()) << added;
      }
    }
    const std::vector<float> rates = {0.1f};
    FrameIdentity id;
    id.round = round;
    id.learning_rates = rates;
    const auto update = accumulator->Finish(id, 1);
    const Update decoded = *DecodeUpdate(update->chunks, *job_, slice(), frame.plan);
    std::vector<float> mean(slice().runs[0].length);
    decoded.MeanOfRun(slice(), 0, mean.data());
    return mean[7];
  }

  std::vector<float> gradient_;
};

TEST_F(GradientStoreTest, CodecWithoutResidualReadsTheCallersMemory) {
  Prepare("dense:values=fp32");
  ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 1).ok());
  EXPECT_EQ(store_->InputsOf(slice())[0].gradient, gradient_.data() + slice().runs[0].offset);
}

TEST_F(GradientStoreTest, FrameThatWasNotIncludedTravelsWithTheNextOne) {
  for (const char* codec : {"dense:values=fp32", "dense:values=fixed32", "dense:values=bf16"}) {
    Prepare(codec);
    ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 1).ok());
    const EncodedFrame late = Encode(1);
    store_->Encoded(slice());
    ASSERT_TRUE(store_->Returned(slice(), *codec_, late).ok());
    store_->EndRound();
    ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 2).ok());
    const std::vector<float> values = Values();
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], 2 * gradient_[i]) << codec << " " << i;
    const EncodedFrame merged = Encode(2);
    store_->Encoded(slice());
    store_->EndRound();
    ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 3).ok());
    EXPECT_EQ(Values(), gradient_) << codec;
  }
}

TEST_F(GradientStoreTest, WhatManyLateFramesGiveBackLeavesOverSeveralRounds) {
  constexpr float kBelow = 250'000.0f;  // of the limit of 2^18, as every gradient
  for (const char* codec : {"dense:values=fp32", "dense:values=bf16", "zen", "zen:values=fp16", "adaptive", "terngrad",
                            "fp16", "topk:density=1"}) {
    SCOPED_TRACE(codec);
    Prepare(codec);
    const float gradient = std::string(codec) == "zen:values=fp16" ? 60'000.0f : kBelow;
    std::fill(gradient_.begin(), gradient_.end(), gradient);
    for (uint64_t round = 1; round <= 3; ++round) {
      ASSERT_TRUE(store_->Ingest(0, gradient_.data(), round).ok());
      store_->Select(0, round);
      store_->Keep(slice());
      store_->EndRound();
    }
    double sent = 0;
    const auto send = [&](uint64_t round, float values) {
      std::fill(gradient_.begin(), gradient_.end(), values);
      ASSERT_TRUE(store_->Ingest(0, gradient_.data(), round).ok());
      store_->Select(0, round);
      const EncodedFrame frame = Encode(round);
      store_->Encoded(slice());
      store_->EndRound();
      const float carried = CarriedBy(frame);
      EXPECT_LT(carried, 262'144.0f);
      sent += static_cast<double>(carried);
    };
    send(4, -64);
    EXPECT_GT(sent, 0);
    for (uint64_t round = 5; round < 25; ++round) send(round, 0);
    EXPECT_EQ(sent, 3 * static_cast<double>(gradient) - 64);
  }
}

TEST_F(GradientStoreTest, NonFiniteGradientIsRefusedAndLeavesTheResidual) {
  Prepare("dense:values=fixed32");
  ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 1).ok());
  std::vector<float> bad = gradient_;
  bad[123] = -std::numeric_limits<float>::infinity();
  const absl::Status status = store_->Ingest(0, bad.data(), 2);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  for (const char* part : {"'weight'", "index 123", "-inf", "round 2"})
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  EXPECT_EQ(Values(), gradient_);
}

TEST_F(GradientStoreTest, NonFiniteGradientIsSanitized) {
  Prepare("dense:values=fp32", v1::PUSH_GRADIENT, v1::NONFINITE_SANITIZE);
  std::vector<float> bad = gradient_;
  bad[0] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(store_->Ingest(0, bad.data(), 1).ok());
  std::vector<float> expected = gradient_;
  expected[0] = 0;
  EXPECT_EQ(Values(), expected);
  EXPECT_EQ(store_->sanitized_elements(), 1u);
  EXPECT_TRUE(std::isnan(bad[0])) << "the caller's memory is not touched";
}

TEST_F(GradientStoreTest, ASkippedRoundLeavesNoTrace) {
  for (const auto& [codec, push] : {std::pair("dense:values=fixed32", v1::PUSH_GRADIENT),
                                    {"dense:values=fp32", v1::PUSH_STEP},
                                    {"topk:density=0.1", v1::PUSH_STEP},
                                    {"dgc:density=0.1", v1::PUSH_GRADIENT}}) {
    SCOPED_TRACE(codec);
    Prepare(codec, push, v1::NONFINITE_SKIP);
    for (float& x : gradient_) x /= 3;  // leaves a residual
    const auto step = [&](uint64_t round) {
      EXPECT_TRUE(store_->Ingest(0, gradient_.data(), round).ok());
      store_->Select(0, round);
      Encode(round);
      store_->Encoded(slice());
    };
    const auto kept = [&] {
      const GradientStore::Kept k = store_->KeptOf(0);
      const auto copy = [](const HostView& view) { return std::vector<float>(view.values.begin(), view.values.end()); };
      return std::tuple(copy(k.pending), copy(k.second_moment), copy(k.velocity), k.steps);
    };
    step(1);
    store_->EndRound();
    const auto before = kept();
    step(2);
    EXPECT_NE(kept(), before);
    store_->Undo(slice());
    EXPECT_EQ(kept(), before);
    std::vector<float> bad = gradient_;
    bad[7] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(store_->Ingest(0, bad.data(), 3).ok());
    store_->Undo(slice());
    EXPECT_EQ(kept(), before);
  }
}

TEST_F(GradientStoreTest, WhatWasMadeInASkippedRoundIsZero) {
  Prepare("dense:values=bf16", v1::PUSH_GRADIENT, v1::NONFINITE_SKIP);
  ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 1).ok());
  store_->Keep(slice());
  store_->Undo(slice());
  store_->EndRound();
  ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 2).ok());
  EXPECT_EQ(Values(), gradient_);
}

TEST_F(GradientStoreTest, FirstStepIsTheSignOfTheGradient) {
  Prepare("dense:values=fp32", v1::PUSH_STEP);
  ASSERT_TRUE(store_->Ingest(0, gradient_.data(), 1).ok());
  for (float x : Values()) EXPECT_NEAR(x, 1.0f, 1e-5);
  const EncodedFrame merged = Encode(1);
  store_->Encoded(slice());
  for (float x : Values()) EXPECT_EQ(x, 0.0f) << "sent steps do not travel twice";
}

}  // namespace
}  // namespace gradwire::client
