// The worker's memory of gradients on a device, here the host layer of tests/gpu, next to the one in host memory: the
// same frames and residuals, whatever becomes of the frames.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "client/cpp/internal/gradients.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "gtest/gtest.h"
#include "tests/gpu/host/queued_device.h"

namespace gradwire::client {
namespace {

using kernels::cuda::HostDeviceOptions;
using kernels::cuda::Lag;
using kernels::cuda::QueuedBackend;

std::vector<uint8_t> BytesOf(const EncodedFrame& frame) {
  std::vector<uint8_t> bytes;
  for (const Bytes& chunk : frame.chunks) bytes.insert(bytes.end(), chunk.data(), chunk.data() + chunk.size());
  return bytes;
}

struct MemoryCase {
  std::string codec;
  v1::PushKind push;
  Lag lag;
};

// Two tensors in runs of 64 on two shards, in one bucket.
class DeviceMemoryTest : public ::testing::TestWithParam<MemoryCase> {
 protected:
  void SetUp() override {
    v1::JobSpec spec;
    spec.set_name("memory");
    for (const uint64_t elements : {3001u, 700u}) {
      v1::TensorSpec& tensor = *spec.add_tensors();
      tensor.set_name("w" + std::to_string(elements));
      tensor.add_shape(elements);
    }
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(GetParam().codec);
    spec.set_push(GetParam().push);
    if (GetParam().push != v1::PUSH_GRADIENT) {
      spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_STEP);
      spec.mutable_step()->set_residual_decay(0.9f);
    }
    spec.set_run_elements(64);
    auto job = Job::Make(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    job_ = std::make_unique<Job>(*std::move(job));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 2));
    ASSERT_EQ(layout_->bucket_count(), 1u);
    std::vector<const Codec*> of_slice;
    for (uint32_t s = 0; s < 2; ++s) {
      codecs_.push_back(*MakeCodec({job_.get(), &layout_->at(0, s), backend_.get()}));
      of_slice.push_back(codecs_.back().get());
    }
    auto memory = MakeDeviceMemory(
        {.device = &device_, .job = job_.get(), .layout = layout_.get(), .codecs = of_slice, .applies_updates = true});
    ASSERT_TRUE(memory.ok()) << memory.status();
    device_memory_ = *std::move(memory);
    host_ = std::make_unique<GradientStore>(job_.get(), std::vector<const Codec*>{of_slice[0], of_slice[0]},
                                            MakeHostMemory(backend_.get()));
    store_ = std::make_unique<GradientStore>(job_.get(), std::vector<const Codec*>{of_slice[0], of_slice[0]},
                                             device_memory_);
    for (const Tensor& tensor : job_->tensors()) {
      gradients_.emplace_back(tensor.elements);
      on_device_.push_back(static_cast<float*>(device_.runtime().Allocate(tensor.elements * sizeof(float), stream_)));
    }
  }
  void TearDown() override {
    store_.reset();
    device_memory_.reset();
    for (float* array : on_device_) device_.runtime().Free(array, nullptr);
    EXPECT_EQ(device_.device().allocated(), 0) << "device or pinned memory was not freed";
  }

  // The caller's stream makes them, and does so as late as it may.
  void TakeIn(uint64_t round, float deviation = 0.1f, float mean = 0) {
    for (uint32_t t = 0; t < gradients_.size(); ++t) {
      for (float& x : gradients_[t]) x = mean + deviation * std::normal_distribution<float>(0, 1)(random_);
      host_->TakeIn(t, gradients_[t].data(), round);
      device_.runtime().ToDevice(on_device_[t], gradients_[t].data(), gradients_[t].size() * sizeof(float), stream_);
      device_memory_->Announce(t, stream_);
      store_->TakeIn(t, on_device_[t], round);
      for (GradientStore* store : {host_.get(), store_.get()}) store->Select(t, round);
    }
    for (uint32_t t = 0; t < gradients_.size(); ++t)
      for (GradientStore* store : {host_.get(), store_.get()}) ASSERT_TRUE(store->Taken(t).ok());
  }
  EncodedFrame Encode(GradientStore& store, uint32_t shard, uint64_t round) {
    const std::vector<float> rates = {0.1f};
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(shard);
    id.round = round;
    id.learning_rates = rates;
    RoundPlan plan = codecs_[shard]->InitialPlan();
    if (!plan.exponents.empty()) plan.exponents.assign(plan.exponents.size(), -12);
    auto frame = store.EncoderOf(*codecs_[shard])->Encode(id, plan, store.InputsOf(layout_->at(0, shard)));
    EXPECT_TRUE(frame.ok()) << frame.status();
    store.Encoded(layout_->at(0, shard));
    return *std::move(frame);
  }
  void ExpectSame(uint64_t round) {
    const auto same = [](const HostView& a, const HostView& b) {
      return a.values.size() == b.values.size() &&
             (a.values.empty() || std::memcmp(a.values.data(), b.values.data(), a.values.size_bytes()) == 0);
    };
    for (uint32_t t = 0; t < gradients_.size(); ++t) {
      const GradientStore::Kept expected = host_->KeptOf(t), found = store_->KeptOf(t);
      ASSERT_TRUE(same(expected.pending, found.pending)) << "tensor " << t << ", round " << round;
      ASSERT_TRUE(same(expected.second_moment, found.second_moment)) << "tensor " << t << ", round " << round;
      ASSERT_EQ(expected.steps, found.steps);
    }
  }

  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  QueuedBackend device_{"queued", HostDeviceOptions{.memory_bytes = 1 << 26}, GetParam().lag};
  kernels::Stream* const stream_ = device_.runtime().NewStream();
  std::mt19937 random_{5};
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::shared_ptr<TensorMemory> device_memory_;
  std::unique_ptr<GradientStore> host_, store_;
  std::vector<std::vector<float>> gradients_;
  std::vector<float*> on_device_;
};

TEST_P(DeviceMemoryTest, FramesThatAreMergedReturnedDeferredOrNeverSent) {
  for (uint64_t round = 1; round < 24; ++round) {
    TakeIn(round);
    for (uint32_t shard = 0; shard < 2; ++shard) {
      const BucketLayout& slice = layout_->at(0, shard);
      const uint32_t fate = random_() % 4;
      if (fate == 0) {
        for (GradientStore* store : {host_.get(), store_.get()}) store->Keep(slice);
        continue;
      }
      const EncodedFrame expected = Encode(*host_, shard, round), found = Encode(*store_, shard, round);
      ASSERT_EQ(BytesOf(found), BytesOf(expected)) << "round " << round;
      ASSERT_EQ(found.positions, expected.positions);
      std::vector<uint32_t> deferred;
      for (uint32_t position = 0; position < slice.elements; ++position)
        if (random_() % 3 == 0) deferred.push_back(position);
      for (GradientStore* store : {host_.get(), store_.get()}) {
        const EncodedFrame& frame = store == host_.get() ? expected : found;
        absl::Status back;
        if (fate == 1) back = store->Returned(slice, *codecs_[shard], frame);
        if (fate == 2) back = store->Deferred(slice, *codecs_[shard], frame, deferred);
        ASSERT_TRUE(back.ok()) << back;
      }
    }
    for (GradientStore* store : {host_.get(), store_.get()}) store->EndRound();
    if (round % 5 == 0) ExpectSame(round);  // a look waits for everything
    if (HasFatalFailure()) return;
  }
  ExpectSame(24);
}

TEST_P(DeviceMemoryTest, WhatIsTooLargeForOneFrameLeavesOverSeveral) {
  for (uint64_t round = 1; round < 9; ++round) {
    if (round < 4)
      TakeIn(round, 1000, 250'000);
    else
      TakeIn(round);
    for (uint32_t shard = 0; shard < 2; ++shard) {
      if (round < 4) {
        for (GradientStore* store : {host_.get(), store_.get()}) store->Keep(layout_->at(0, shard));
        continue;
      }
      const EncodedFrame expected = Encode(*host_, shard, round), found = Encode(*store_, shard, round);
      ASSERT_EQ(BytesOf(found), BytesOf(expected)) << "round " << round;
    }
    for (GradientStore* store : {host_.get(), store_.get()}) store->EndRound();
    ExpectSame(round);
    if (HasFatalFailure()) return;
  }
}

std::vector<MemoryCase> MemoryCases() {
  std::vector<MemoryCase> cases;
  for (const char* codec : {"dense:values=fp32", "dense:values=bf16", "dense:values=fixed32", "dense:values=fixed16",
                            "tagc:density=0.05,cells=16", "tagc:density=0.2,cells=32"})
    for (const v1::PushKind push : {v1::PUSH_GRADIENT, v1::PUSH_STEP, v1::PUSH_DELTA})
      for (const Lag lag : {Lag::kLatest, Lag::kRandom}) cases.push_back({codec, push, lag});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Codecs, DeviceMemoryTest, ::testing::ValuesIn(MemoryCases()));

}  // namespace
}  // namespace gradwire::client
