// What a worker computes for a slice, against shards that are accumulators: steps, residuals, and what becomes of frames
// that were not merged, updates that are gone and rounds that were skipped. Gradients are small integers, so that sums
// are exact in float32 and nothing needs a tolerance.
#include "client/cpp/internal/slice_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/wire/frame.h"
#include "kernels/backend.h"

namespace gradwire::client {
namespace {

constexpr uint32_t kShardCount = 2;

v1::JobSpec SpecOf(const std::string& codec, v1::NonFinitePolicy nonfinite = v1::NONFINITE_REFUSE) {
  v1::JobSpec spec;
  spec.set_name("slices");
  for (uint64_t size : {300, 1, 1700}) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", spec.tensors_size()));
    tensor->add_shape(size);
  }
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.mutable_optimizer()->add_groups();
  spec.set_codec(codec);
  spec.set_nonfinite(nonfinite);
  spec.set_min_workers(1);
  spec.set_max_workers(1);
  spec.set_run_elements(64);
  spec.set_bucket_bytes(4096);
  return spec;
}

using Tensors = std::vector<std::vector<float>>;

// One worker and the shards of its job.
class SliceWorkTest : public testing::Test {
 protected:
  void Make(const v1::JobSpec& spec, PullMode pull = PullMode::kUpdate) {
    absl::StatusOr<Job> made = Job::Make(spec);
    ASSERT_TRUE(made.ok()) << made.status();
    job_ = std::make_unique<Job>(*std::move(made));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, kShardCount));
    backend_ = *kernels::MakeBackend("cpu");
    std::vector<std::span<float>> spans;
    for (const Tensor& tensor : job_->tensors()) parameters_.emplace_back(tensor.elements);
    for (std::vector<float>& tensor : parameters_) spans.emplace_back(tensor);
    std::vector<const Codec*> of_tensor(job_->tensors().size()), of_slice;
    std::vector<PlanWindow> plans;
    for (uint32_t b = 0; b < layout_->bucket_count(); ++b) {
      for (uint32_t s = 0; s < kShardCount; ++s) {
        codecs_.push_back(*MakeCodec({job_.get(), &layout_->at(b, s), backend_.get()}));
        of_slice.push_back(codecs_.back().get());
        plans.emplace_back(PlansKept(*job_), codecs_.back()->InitialPlan());
        shards_.push_back(codecs_.back()->NewAccumulator());
      }
      for (const BucketPart& part : layout_->parts(b)) of_tensor[part.tensor] = codecs_.back().get();
    }
    const bool applies = pull == PullMode::kUpdate;
    replica_ = std::make_unique<Replica>(job_.get(), layout_.get(), MakeHostMemory(backend_.get()), spans, applies);
    gradients_ = std::make_unique<GradientStore>(job_.get(), of_tensor, MakeHostMemory(backend_.get()));
    SliceContext context{job_.get(), layout_.get(), pull, 7, of_slice, replica_.get(), gradients_.get()};
    work_ = std::make_unique<SliceWork>(context, std::move(plans));
  }

  void Clear() {
    work_.reset();
    gradients_.reset();
    replica_.reset();
    shards_.clear();
    codecs_.clear();
    parameters_.clear();
  }

  Tensors NextGradient() {
    Tensors gradient;
    for (const Tensor& tensor : job_->tensors()) {
      gradient.emplace_back(tensor.elements);
      for (float& x : gradient.back()) x = static_cast<float>(static_cast<int>(random_() % 2001) - 1000);
    }
    return gradient;
  }

  // The frames of a round, one per slice.
  std::vector<SliceBytes> Encode(uint64_t round, const Tensors& gradient) {
    for (uint32_t t = 0; t < gradient.size(); ++t) {
      EXPECT_TRUE(gradients_->Ingest(t, gradient[t].data(), round).ok());
      if (round > 0) gradients_->Select(t, round);
    }
    std::vector<SliceBytes> bytes(work_->slices());
    for (uint32_t slice = 0; slice < work_->slices(); ++slice)
      EXPECT_TRUE(work_->Encode(slice, round, kRates, &bytes[slice]).ok());
    return bytes;
  }

  // What the shard makes of it.
  std::vector<Bytes> Merge(uint32_t slice, uint64_t round, const SliceBytes& bytes) {
    Accumulator& shard = *shards_[slice];
    shard.Open(round, bytes.frame->plan);
    const absl::StatusOr<std::vector<wire::Chunk>> chunks = wire::ParseFrame(bytes.frame->chunks);
    EXPECT_TRUE(chunks.ok());
    for (const wire::Chunk& chunk : *chunks)
      for (const wire::Segment& segment : chunk.segments)
        if (segment.type != wire::SegmentType::kLearningRates) EXPECT_TRUE(shard.Add(segment).ok());
    absl::StatusOr<UpdateFrame> update = shard.Finish(IdOf(slice, round), 1);
    EXPECT_TRUE(update.ok()) << update.status();
    return update->chunks;
  }

  FrameIdentity IdOf(uint32_t slice, uint64_t round) const {
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(slice % kShardCount);
    id.bucket = slice / kShardCount;
    id.round = round;
    id.learning_rates = kRates;
    return id;
  }

  absl::Status Take(uint32_t slice, uint64_t round, bool included, SliceBytes* bytes) {
    const absl::Status decoded = work_->Decode(slice, round, bytes);
    return decoded.ok() ? work_->Apply(slice, round, included, bytes) : decoded;
  }

  // A whole round in which everything arrives.
  void Round(uint64_t round, const Tensors& gradient) {
    std::vector<SliceBytes> bytes = Encode(round, gradient);
    for (uint32_t slice = 0; slice < work_->slices(); ++slice) {
      bytes[slice].update_chunks = Merge(slice, round, bytes[slice]);
      EXPECT_EQ(Take(slice, round, true, &bytes[slice]), absl::OkStatus());
    }
    gradients_->EndRound();
  }

  Tensors Residuals() const {
    Tensors residuals;
    for (uint32_t t = 0; t < job_->tensors().size(); ++t) {
      const HostView pending = gradients_->KeptOf(t).pending;
      residuals.emplace_back(pending.values.begin(), pending.values.end());
      residuals.back().resize(job_->tensors()[t].elements);
    }
    return residuals;
  }

  static constexpr float kRates[] = {1.0f};
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::vector<std::unique_ptr<Accumulator>> shards_;
  Tensors parameters_;
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<GradientStore> gradients_;
  std::unique_ptr<SliceWork> work_;
  std::mt19937 random_{11};
};

void Add(const Tensors& more, Tensors* sum) {
  for (size_t t = 0; t < more.size(); ++t)
    for (size_t i = 0; i < more[t].size(); ++i) (*sum)[t][i] += more[t][i];
}

class EveryCodec : public SliceWorkTest, public testing::WithParamInterface<const char*> {};

// With a learning rate of 1 the parameters are what was given, with its sign turned, but for what waits.
TEST_P(EveryCodec, WhatWasGivenIsInAStepOrInTheResidual) {
  Make(SpecOf(GetParam()));
  Tensors given;
  for (const Tensor& tensor : job_->tensors()) given.emplace_back(tensor.elements);
  for (uint64_t round = 0; round < 6; ++round) {
    const Tensors gradient = NextGradient();
    Round(round, gradient);
    if (round > 0) Add(gradient, &given);  // round 0 only calibrates
    if (round == 0) EXPECT_EQ(parameters_, Tensors({std::vector<float>(300), {0}, std::vector<float>(1700)}));
  }
  const Tensors waiting = Residuals();
  size_t stepped = 0;
  for (size_t t = 0; t < given.size(); ++t)
    for (size_t i = 0; i < given[t].size(); ++i) {
      EXPECT_EQ(waiting[t][i] - parameters_[t][i], given[t][i]) << "tensor " << t << " element " << i;
      stepped += parameters_[t][i] != 0 ? 1 : 0;
    }
  EXPECT_GT(stepped, 100u);
}

INSTANTIATE_TEST_SUITE_P(Codecs, EveryCodec,
                         testing::Values("dense:fp32", "topk:density=0.1,values=fp32", "threshold:value=500",
                                         "randomk:density=0.1,values=fp32", "zen"));

TEST_F(SliceWorkTest, AFrameThatWasNotMergedTravelsWithTheNextOne) {
  Make(SpecOf("dense:fp32"));
  Round(0, NextGradient());
  const Tensors first = NextGradient();
  std::vector<SliceBytes> bytes = Encode(1, first);
  // Of slice 0 the shard has made a version without this worker's frame: of nobody's, here.
  for (uint32_t slice = 0; slice < work_->slices(); ++slice) {
    bytes[slice].update_chunks = Merge(slice, 1, bytes[slice]);
    if (slice == 0) {
      shards_[0]->Open(1, bytes[0].frame->plan);
      bytes[0].update_chunks = shards_[0]->Finish(IdOf(0, 1), 0)->chunks;
    }
    ASSERT_EQ(Take(slice, 1, slice != 0, &bytes[slice]), absl::OkStatus());
  }
  gradients_->EndRound();
  const Tensors second = NextGradient();
  Round(2, second);
  Tensors both = first;
  Add(second, &both);
  for (size_t t = 0; t < both.size(); ++t)
    for (size_t i = 0; i < both[t].size(); ++i) EXPECT_EQ(parameters_[t][i], -both[t][i]) << t << " " << i;
}

TEST_F(SliceWorkTest, ASkippedRoundLeavesEverythingAsItWas) {
  Make(SpecOf("topk:density=0.1,values=fp32", v1::NONFINITE_SKIP));
  for (uint64_t round = 0; round < 3; ++round) Round(round, NextGradient());
  const Tensors parameters = parameters_, residuals = Residuals();
  std::vector<SliceBytes> bytes = Encode(3, NextGradient());
  EXPECT_NE(Residuals(), residuals);
  for (uint32_t slice = 0; slice < work_->slices(); ++slice) {
    FrameIdentity id = IdOf(slice, 3);
    id.nonfinite_rounds = 1;
    const BucketLayout& layout = layout_->at(slice / kShardCount, slice % kShardCount);
    bytes[slice].update_chunks = SkippedUpdate(id, layout, bytes[slice].frame->plan).chunks;
    ASSERT_EQ(Take(slice, 3, true, &bytes[slice]), absl::OkStatus());
    EXPECT_TRUE(bytes[slice].skipped);
    EXPECT_EQ(work_->plans(slice).version(), 4u);
  }
  EXPECT_EQ(parameters_, parameters);
  EXPECT_EQ(Residuals(), residuals);
}

TEST_F(SliceWorkTest, WhatAnUpdateThatIsGoneDeferredIsNotGuessed) {
  for (const bool defers : {false, true}) {
    SCOPED_TRACE(defers);
    Clear();
    Make(SpecOf(defers ? "tagc:density=0.1,form=sketch" : "topk:density=0.1,values=fp32"));
    Round(0, NextGradient());
    std::vector<SliceBytes> bytes = Encode(1, NextGradient());
    const Tensors parameters = parameters_;
    bytes[0].update_gone = true;
    const absl::Status taken = Take(0, 1, /*included=*/true, &bytes[0]);
    EXPECT_EQ(absl::IsDataLoss(taken), defers) << taken;
    EXPECT_EQ(taken.ok(), !defers);
    EXPECT_EQ(parameters_, parameters);
    EXPECT_EQ(work_->plans(0).version(), 1u) << "the replica stays where it is";
  }
}

TEST_F(SliceWorkTest, AnUpdateOfAnotherRoundIsRefused) {
  Make(SpecOf("dense:fp32"));
  Round(0, NextGradient());
  std::vector<SliceBytes> bytes = Encode(1, NextGradient());
  SliceBytes wrong;
  wrong.update_chunks = Merge(0, 1, bytes[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(work_->Decode(0, 2, &wrong)));
  EXPECT_TRUE(absl::IsInvalidArgument(work_->Follow(0, 2, wrong.update_chunks)));
  EXPECT_EQ(work_->plans(0).version(), 1u);
}

TEST_F(SliceWorkTest, AsksForWhatItsPullNeeds) {
  struct Case {
    const char* codec;
    PullMode pull;
    v1::PullKind parameters;
    bool update;
  };
  const Case cases[] = {
      {"topk:density=0.1", PullMode::kUpdate, v1::PULL_UNSPECIFIED, true},
      {"topk:density=0.1", PullMode::kParams, v1::PULL_PARAMS_F32, false},
      {"tagc:density=0.1,form=sketch", PullMode::kParams, v1::PULL_PARAMS_F32, true},
      {"tagc:density=0.1,form=list", PullMode::kParamsBf16, v1::PULL_PARAMS_BF16, false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.codec, " ", static_cast<int>(c.pull)));
    Clear();
    Make(SpecOf(c.codec), c.pull);
    EXPECT_EQ(work_->ParametersKind(), c.parameters);
    for (uint32_t slice = 0; slice < work_->slices(); ++slice) EXPECT_EQ(work_->NeedsUpdate(slice), c.update);
  }
}

TEST_F(SliceWorkTest, AFrameThatAbstainsHasNoBodyAndSaysWhy) {
  Make(SpecOf("dense:fp32", v1::NONFINITE_SKIP));
  for (const bool nonfinite : {false, true}) {
    const auto chunks = wire::ParseFrame(work_->EncodeAbstain(3, 9, nonfinite));
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    const wire::FrameHeader& header = chunks->at(0).header;
    EXPECT_EQ(header.bucket, 3 / kShardCount);
    EXPECT_EQ(header.shard, 3 % kShardCount);
    EXPECT_EQ(header.round, 9u);
    EXPECT_EQ(header.incarnation, 7u);
    EXPECT_EQ(header.flags, wire::kAbstain | (nonfinite ? wire::kNonFinite : 0));
    EXPECT_TRUE(chunks->at(0).segments.empty());
  }
}

}  // namespace
}  // namespace gradwire::client
