// A worker of two shards without connections, and the shards as accumulators.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/slice_work.h"
#include "common/wire/frame.h"
#include "kernels/backend.h"

namespace gradwire::client {

inline constexpr uint32_t kShardCount = 2;

// Three tensors in several buckets, one of which holds no more than a scalar; SGD without anything else.
inline v1::JobSpec SmallSpec(const std::string& codec, v1::NonFinitePolicy nonfinite = v1::NONFINITE_REFUSE) {
  v1::JobSpec spec;
  spec.set_name("small");
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

inline void AddTo(Tensors* sum, const Tensors& more) {
  for (size_t t = 0; t < more.size(); ++t)
    for (size_t i = 0; i < more[t].size(); ++i) (*sum)[t][i] += more[t][i];
}

// Gradients are small integers, so that sums are exact in float32 and nothing needs a tolerance.
class OneWorker {
 public:
  explicit OneWorker(const v1::JobSpec& spec, PullMode pull = PullMode::kUpdate)
      : job(*Job::Make(spec)), layout(*Layout::Make(job, kShardCount)), backend(*kernels::MakeBackend("cpu")) {
    std::vector<std::span<float>> spans;
    for (const Tensor& tensor : job.tensors()) parameters.emplace_back(tensor.elements);
    for (std::vector<float>& tensor : parameters) spans.emplace_back(tensor);
    std::vector<const Codec*> of_tensor(job.tensors().size()), of_slice;
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      for (uint32_t s = 0; s < kShardCount; ++s) {
        codecs.push_back(*MakeCodec({&job, &layout.at(b, s), backend.get()}));
        of_slice.push_back(codecs.back().get());
        plans.emplace_back(PlansKept(job), codecs.back()->InitialPlan());
        shards.push_back(codecs.back()->NewAccumulator());
      }
      for (const BucketPart& part : layout.parts(b)) of_tensor[part.tensor] = codecs.back().get();
    }
    const bool applies = pull == PullMode::kUpdate;
    replica = std::make_unique<Replica>(&job, &layout, MakeHostMemory(backend.get()), spans, applies);
    gradients = std::make_unique<GradientStore>(&job, of_tensor, MakeHostMemory(backend.get()));
    context = {&job, &layout, pull, 7, of_slice, replica.get(), gradients.get()};
  }

  const BucketLayout& LayoutOf(uint32_t slice) const { return layout.at(slice / kShardCount, slice % kShardCount); }
  uint32_t slices() const { return static_cast<uint32_t>(codecs.size()); }
  static FrameIdentity IdOf(uint32_t slice, uint64_t round) {
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(slice % kShardCount);
    id.bucket = slice / kShardCount;
    id.round = round;
    id.learning_rates = kRates;
    return id;
  }

  Tensors NextGradient() {
    Tensors gradient;
    for (const Tensor& tensor : job.tensors()) {
      gradient.emplace_back(tensor.elements);
      for (float& x : gradient.back()) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
    }
    return gradient;
  }

  // What the shard makes of one frame, which was encoded by `plan`. No frame: of a round without contributors.
  std::vector<wire::Chunk> Merge(uint32_t slice, uint64_t round, const RoundPlan& plan,
                                 const std::vector<Bytes>& frame) {
    Accumulator& shard = *shards[slice];
    shard.Open(round, plan);
    if (!frame.empty()) {
      const absl::StatusOr<std::vector<wire::Chunk>> chunks = wire::ParseFrame(frame);
      EXPECT_TRUE(chunks.ok()) << chunks.status();
      for (const wire::Chunk& chunk : *chunks) {
        for (const wire::Segment& segment : chunk.segments) {
          if (segment.type == wire::SegmentType::kLearningRates) continue;
          EXPECT_TRUE(shard.Add(segment).ok());
        }
      }
    }
    absl::StatusOr<UpdateFrame> update = shard.Finish(IdOf(slice, round), frame.empty() ? 0 : 1);
    EXPECT_TRUE(update.ok()) << update.status();
    return *wire::ParseFrame(update->chunks);
  }

  // What waits to be sent; zeros where nothing does.
  Tensors Residuals() const {
    Tensors residuals;
    for (uint32_t t = 0; t < job.tensors().size(); ++t) {
      const HostView pending = gradients->KeptOf(t).pending;
      residuals.emplace_back(pending.values.begin(), pending.values.end());
      residuals.back().resize(job.tensors()[t].elements);
    }
    return residuals;
  }

  static constexpr float kRates[] = {1.0f};
  Job job;
  Layout layout;
  std::unique_ptr<kernels::Backend> backend;
  std::vector<std::unique_ptr<Codec>> codecs;  // by slice
  std::vector<PlanWindow> plans;
  std::vector<std::unique_ptr<Accumulator>> shards;
  Tensors parameters;
  std::unique_ptr<Replica> replica;
  std::unique_ptr<GradientStore> gradients;
  SliceContext context;
  std::mt19937 random{11};
};

}  // namespace gradwire::client
