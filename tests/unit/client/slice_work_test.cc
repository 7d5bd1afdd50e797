// What a worker computes for a slice, against shards that are accumulators: steps, residuals, and what becomes of
// frames that were not merged, updates that are gone and rounds that were skipped.
#include "client/cpp/internal/slice_work.h"

#include <gtest/gtest.h>

#include "tests/unit/client/one_worker.h"

namespace gradwire::client {
namespace {

struct Working : OneWorker {
  explicit Working(const v1::JobSpec& spec, PullMode pull = PullMode::kUpdate)
      : OneWorker(spec, pull), work(context, plans) {}

  // The frames of a round, one per slice.
  std::vector<SliceBytes> Encode(uint64_t round, const Tensors& gradient) {
    for (uint32_t t = 0; t < gradient.size(); ++t) EXPECT_TRUE(gradients->Ingest(t, gradient[t].data(), round).ok());
    return EncodeTaken(round);
  }
  std::vector<SliceBytes> EncodeTaken(uint64_t round) {
    for (uint32_t t = 0; round > 0 && t < job.tensors().size(); ++t) gradients->Select(t, round);
    std::vector<SliceBytes> bytes(slices());
    for (uint32_t slice = 0; slice < slices(); ++slice)
      EXPECT_TRUE(work.Encode(slice, round, kRates, &bytes[slice]).ok());
    return bytes;
  }

  std::vector<wire::Chunk> MergeFrame(uint32_t slice, uint64_t round, const SliceBytes& bytes) {
    return Merge(slice, round, bytes.frame->plan, bytes.frame->chunks);
  }

  absl::Status Take(uint32_t slice, uint64_t round, bool included, SliceBytes* bytes) {
    const absl::Status decoded = work.Decode(slice, round, bytes);
    return decoded.ok() ? work.Apply(slice, round, included, bytes) : decoded;
  }

  // A whole round in which everything arrives.
  void Round(uint64_t round, const Tensors& gradient) {
    Deliver(round, Encode(round, gradient));
    gradients->EndRound();
  }
  // The first step: round 0 calibrates, round 1 carries the same gradients.
  void FirstStep(const Tensors& gradient) {
    Deliver(0, Encode(0, gradient));
    Deliver(1, EncodeTaken(1));
    gradients->EndRound();
  }
  void Deliver(uint64_t round, std::vector<SliceBytes> bytes) {
    for (uint32_t slice = 0; slice < slices(); ++slice) {
      bytes[slice].update_chunks = MergeFrame(slice, round, bytes[slice]);
      EXPECT_EQ(Take(slice, round, true, &bytes[slice]), absl::OkStatus());
    }
  }

  SliceWork work;
};

class EveryCodec : public testing::TestWithParam<const char*> {};

// With a learning rate of 1 the parameters are what was given, with its sign turned, but for what waits.
TEST_P(EveryCodec, WhatWasGivenIsInAStepOrInTheResidual) {
  Working worker(SmallSpec(GetParam()));
  Tensors given = worker.NextGradient();
  worker.FirstStep(given);
  for (uint64_t round = 2; round < 7; ++round) {
    const Tensors gradient = worker.NextGradient();
    worker.Round(round, gradient);
    AddTo(&given, gradient);
  }
  const Tensors waiting = worker.Residuals();
  size_t stepped = 0;
  for (size_t t = 0; t < given.size(); ++t)
    for (size_t i = 0; i < given[t].size(); ++i) {
      EXPECT_EQ(waiting[t][i] - worker.parameters[t][i], given[t][i]) << "tensor " << t << " element " << i;
      stepped += worker.parameters[t][i] != 0 ? 1 : 0;
    }
  EXPECT_GT(stepped, 100u);
}

INSTANTIATE_TEST_SUITE_P(Codecs, EveryCodec,
                         testing::Values("dense:fp32", "topk:density=0.1,values=fp32", "threshold:value=500",
                                         "randomk:density=0.1,values=fp32", "zen"));

TEST(SliceWorkTest, AFrameThatWasNotMergedTravelsWithTheNextOne) {
  Working worker(SmallSpec("dense:fp32"));
  const Tensors zeros = worker.parameters;
  worker.Round(0, worker.NextGradient());
  const Tensors first = worker.NextGradient();
  std::vector<SliceBytes> bytes = worker.Encode(1, first);
  for (uint32_t slice = 0; slice < worker.slices(); ++slice) {
    // The shards have made the version without this worker.
    bytes[slice].update_chunks = worker.Merge(slice, 1, bytes[slice].frame->plan, {});
    ASSERT_EQ(worker.Take(slice, 1, /*included=*/false, &bytes[slice]), absl::OkStatus());
  }
  worker.gradients->EndRound();
  EXPECT_EQ(worker.parameters, zeros);
  const Tensors second = worker.NextGradient();
  worker.Round(2, second);
  Tensors both = first;
  AddTo(&both, second);
  for (size_t t = 0; t < both.size(); ++t)
    for (size_t i = 0; i < both[t].size(); ++i) EXPECT_EQ(worker.parameters[t][i], -both[t][i]) << t << " " << i;
}

TEST(SliceWorkTest, ASkippedRoundLeavesEverythingAsItWas) {
  Working worker(SmallSpec("topk:density=0.1,values=fp32", v1::NONFINITE_SKIP));
  for (uint64_t round = 0; round < 3; ++round) worker.Round(round, worker.NextGradient());
  const Tensors parameters = worker.parameters, residuals = worker.Residuals();
  std::vector<SliceBytes> bytes = worker.Encode(3, worker.NextGradient());
  EXPECT_NE(worker.Residuals(), residuals);
  for (uint32_t slice = 0; slice < worker.slices(); ++slice) {
    FrameIdentity id = Working::IdOf(slice, 3);
    id.nonfinite_rounds = 1;
    bytes[slice].update_chunks =
        *wire::ParseFrame(SkippedUpdate(id, worker.LayoutOf(slice), bytes[slice].frame->plan).chunks);
    ASSERT_EQ(worker.Take(slice, 3, true, &bytes[slice]), absl::OkStatus());
    EXPECT_TRUE(bytes[slice].skipped);
    EXPECT_EQ(worker.work.plans(slice).version(), 4u);
    EXPECT_EQ(worker.work.plans(slice).nonfinite_rounds(), 1u);
  }
  EXPECT_EQ(worker.parameters, parameters);
  EXPECT_EQ(worker.Residuals(), residuals);
}

TEST(SliceWorkTest, WhatAnUpdateThatIsGoneDeferredIsNotGuessed) {
  for (const auto& [codec, defers] : {std::pair("tagc:density=0.1,form=sketch", true),
                                      {"tagc:density=0.1", false},
                                      {"topk:density=0.1,values=fp32", false}}) {
    SCOPED_TRACE(codec);
    Working worker(SmallSpec(codec));
    worker.Round(0, worker.NextGradient());
    std::vector<SliceBytes> bytes = worker.Encode(1, worker.NextGradient());
    const Tensors parameters = worker.parameters;
    bytes[0].update_gone = true;
    const absl::Status taken = worker.Take(0, 1, /*included=*/true, &bytes[0]);
    EXPECT_EQ(absl::IsDataLoss(taken), defers) << taken;
    EXPECT_EQ(taken.ok(), !defers);
    EXPECT_EQ(worker.parameters, parameters);
    EXPECT_EQ(worker.work.plans(0).version(), 1u) << "the replica stays where it is";
  }
}

TEST(SliceWorkTest, AnUpdateOfAnotherRoundIsRefused) {
  Working worker(SmallSpec("dense:fp32"));
  const std::vector<SliceBytes> bytes = worker.Encode(0, worker.NextGradient());
  SliceBytes old;
  old.update_chunks = worker.MergeFrame(0, 0, bytes[0]);
  worker.gradients->EndRound();
  worker.Round(0, worker.NextGradient());
  EXPECT_TRUE(absl::IsInvalidArgument(worker.work.Decode(0, 1, &old)));
  EXPECT_TRUE(absl::IsInvalidArgument(worker.work.Follow(0, 1, old.update_chunks)));
  EXPECT_EQ(worker.work.plans(0).version(), 1u);
}

TEST(SliceWorkTest, AsksForWhatItsPullNeeds) {
  struct Case {
    const char* codec;
    PullMode pull;
    v1::PullKind parameters;
    v1::PullKind update;
  };
  const Case cases[] = {
      {"topk:density=0.1", PullMode::kUpdate, v1::PULL_UNSPECIFIED, v1::PULL_UPDATE},
      {"topk:density=0.1", PullMode::kParams, v1::PULL_PARAMS_F32, v1::PULL_UNSPECIFIED},
      {"tagc:density=0.1,form=sketch", PullMode::kParams, v1::PULL_PARAMS_F32, v1::PULL_UPDATE},
      {"tagc:density=0.1,form=list", PullMode::kParamsBf16, v1::PULL_PARAMS_BF16, v1::PULL_UNSPECIFIED},
      {"tagc:density=0.1,bits=2", PullMode::kParams, v1::PULL_PARAMS_F32, v1::PULL_UNSPECIFIED},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.codec, " ", static_cast<int>(c.pull)));
    Working worker(SmallSpec(c.codec), c.pull);
    EXPECT_EQ(worker.work.ParametersKind(), c.parameters);
    for (uint32_t slice = 0; slice < worker.slices(); ++slice) EXPECT_EQ(worker.work.UpdateKind(slice), c.update);
  }
}

TEST(SliceWorkTest, AFrameThatAbstainsHasNoBodyAndSaysWhy) {
  Working worker(SmallSpec("dense:fp32", v1::NONFINITE_SKIP));
  for (const bool nonfinite : {false, true}) {
    const auto chunks = wire::ParseFrame(worker.work.EncodeAbstain(3, 9, nonfinite));
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    const wire::FrameHeader& header = chunks->at(0).header;
    EXPECT_EQ(header.bucket, 3 / kShardCount);
    EXPECT_EQ(header.shard, 3 % kShardCount);
    EXPECT_EQ(header.round, 9u);
    EXPECT_EQ(header.incarnation, 7u);
    EXPECT_EQ(header.flags & (wire::kAbstain | wire::kNonFinite), wire::kAbstain | (nonfinite ? wire::kNonFinite : 0));
    EXPECT_TRUE(chunks->at(0).segments.empty());
  }
}

}  // namespace
}  // namespace gradwire::client
