// Encoders of gradients that lie on a device against those in host memory: the same frames, the same residuals.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/codec/select/select.h"
#include "tests/conformance/codec/codec_harness.h"
#include "tests/conformance/codec/device_side.h"

namespace gradwire::testing {
namespace {

using kernels::cuda::DeviceSelection;
using kernels::cuda::Lag;

// A job of several tensors in one bucket of one of two shards, so that stretches of runs end and begin anywhere.
struct Bucket {
  Bucket(const std::string& codec_name, uint64_t elements) {
    v1::JobSpec spec;
    spec.set_name("encode");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(codec_name);
    spec.set_max_workers(4);
    spec.set_bucket_bytes(1u << 30);
    spec.set_run_elements(256);
    for (const uint64_t size : {elements, elements / 3 + 1, uint64_t{1}}) {
      auto* tensor = spec.add_tensors();
      tensor->set_name("w" + std::to_string(spec.tensors_size()));
      tensor->add_shape(size);
    }
    job = std::make_unique<Job>(*Job::Make(spec));
    layout = std::make_unique<Layout>(*Layout::Make(*job, 2));
    codec = *MakeCodec({job.get(), &slice(), backend.get()});
  }
  const BucketLayout& slice() const { return layout->at(0, 1); }

  const std::unique_ptr<kernels::Backend> backend = *kernels::MakeBackend("reference");
  std::unique_ptr<Job> job;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<Codec> codec;
};

// The tensors of a worker on the host and, in one allocation each, on the device.
class Tensors {
 public:
  Tensors(const Bucket& bucket, DeviceSide& device) : bucket_(bucket), device_(device) {
    for (const Tensor& tensor : bucket.job->tensors()) {
      host_.emplace_back(tensor.elements);
      const size_t bytes = tensor.elements * sizeof(float);
      on_device_.push_back(static_cast<float*>(device.runtime().Allocate(bytes, nullptr)));
      selections_.push_back(static_cast<DeviceSelection*>(device.runtime().Allocate(sizeof(DeviceSelection), nullptr)));
    }
  }
  ~Tensors() {
    device_.bucket()->Wait();
    for (float* p : on_device_) device_.runtime().Free(p, nullptr);
    for (DeviceSelection* p : selections_) device_.runtime().Free(p, nullptr);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  void Add(const GradientFn& gradient, uint64_t round) {
    for (size_t t = 0; t < host_.size(); ++t) {
      std::vector<float> g(host_[0].size());  // the first is the largest
      gradient(static_cast<uint32_t>(t), round, &g);
      for (size_t i = 0; i < host_[t].size(); ++i) host_[t][i] += g[i];
      device_.bucket()->Upload(on_device_[t], host_[t].data(), host_[t].size() * sizeof(float));
    }
  }
  std::vector<RunInput> OnHost(uint64_t round) {
    std::vector<RunInput> runs;
    for (const Run& run : bucket_.slice().runs) {
      float* x = host_[run.tensor].data() + run.offset;
      runs.push_back({x, x, SelectThreshold(*bucket_.codec, round, host_[run.tensor], *bucket_.backend)});
    }
    return runs;
  }
  // Selections stay on the device, where the codec selects.
  std::vector<RunInput> OnDevice(uint64_t round) {
    for (size_t t = 0; t < host_.size() && bucket_.codec->selects(); ++t) {
      const double wanted = bucket_.codec->Density(round) * static_cast<double>(host_[t].size());
      device_.bucket()->backend().FindThresholdAsync(on_device_[t], host_[t].size(), wanted, *bucket_.codec->selects(),
                                                     selections_[t], device_.bucket()->stream());
    }
    std::vector<RunInput> runs;
    for (const Run& run : bucket_.slice().runs) {
      float* x = on_device_[run.tensor] + run.offset;
      runs.push_back({x, x, {}, bucket_.codec->selects() ? selections_[run.tensor] : nullptr});
    }
    return runs;
  }
  void ExpectSame() {
    for (size_t t = 0; t < host_.size(); ++t) {
      std::vector<float> now(host_[t].size());
      device_.runtime().ToHost(now.data(), on_device_[t], now.size() * sizeof(float), device_.bucket()->stream());
      ASSERT_EQ(std::memcmp(now.data(), host_[t].data(), now.size() * sizeof(float)), 0) << "residual of tensor " << t;
    }
  }

 private:
  const Bucket& bucket_;
  DeviceSide& device_;
  std::vector<std::vector<float>> host_;
  std::vector<float*> on_device_;
  std::vector<DeviceSelection*> selections_;
};

// Of the round behind one of this frame alone.
RoundPlan PlanBehind(const EncodedFrame& frame, const FrameIdentity& id, const RoundPlan& plan,
                     Accumulator& accumulator) {
  accumulator.Open(id.round, plan);
  std::mt19937_64 random(id.round);
  MergeShuffled({frame}, random, &accumulator);
  return accumulator.Finish(id, 1)->next;
}

class DeviceEncoder : public ::testing::TestWithParam<Lag> {};

TEST_P(DeviceEncoder, MakesTheFramesOfTheHost) {
  for (const char* codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc:density=0.001,cells=8",
                            "tagc:density=0.05,cells=16,form=sketch", "tagc:density=0.3,cells=32",
                            "tagc:density=0.3,cells=32,form=sketch", "tagc:density=0.05,bits=2"}) {
    for (const bool clustered : {false, true}) {
      for (const uint64_t elements : {1u, 63u, 1025u, 70'001u}) {
        for (const uint64_t pinned_bytes : {uint64_t{64}, uint64_t{1} << 20}) {
          SCOPED_TRACE(std::string(codec) + ", " + std::to_string(elements) + " elements, " +
                       std::to_string(pinned_bytes) + " bytes pinned");
          const Bucket bucket(codec, elements);
          DeviceSide device(0, 0, pinned_bytes, GetParam());
          const std::unique_ptr<Encoder> host = bucket.codec->NewEncoder();
          auto on_device = bucket.codec->NewDeviceEncoder(device.bucket());
          ASSERT_TRUE(on_device.ok()) << on_device.status();
          Tensors tensors(bucket, device);
          const GradientFn gradient =
              clustered ? DyadicGradient(3, elements, 0.03, true) : GaussianGradient(3, elements);
          const std::unique_ptr<Accumulator> accumulator = bucket.codec->NewAccumulator();
          RoundPlan plan = bucket.codec->InitialPlan();
          const float rate = 0.5f;
          for (uint64_t round = 0; round < 4; ++round) {
            const FrameIdentity id = {1, 0, round, 77, {&rate, 1}};
            tensors.Add(gradient, round);
            const std::vector<RunInput> device_runs = tensors.OnDevice(round);
            const auto expected = host->Encode(id, plan, tensors.OnHost(round));
            ASSERT_TRUE(expected.ok()) << expected.status();
            const auto frame = (*on_device)->Encode(id, plan, device_runs);
            ASSERT_TRUE(frame.ok()) << frame.status();
            ASSERT_EQ(Joined(frame->chunks), Joined(expected->chunks)) << "round " << round;
            ASSERT_EQ(frame->positions, expected->positions);
            ASSERT_EQ(frame->integers, expected->integers);
            ASSERT_EQ(frame->bytes, expected->bytes);
            ASSERT_EQ(frame->plan, plan);
            tensors.ExpectSame();
            if (HasFatalFailure()) return;
            plan = PlanBehind(*expected, id, plan, *accumulator);
          }
        }
      }
    }
  }
}

// A frame that fails is in no round: all that it would have carried has to be pending still.
TEST_P(DeviceEncoder, WithoutMemoryForItsCellsTakesNothing) {
  constexpr uint64_t kElements = 3000;
  const Bucket bucket("tagc:density=0.9,cells=32,form=sketch", kElements);
  DeviceSide device(0, 0, 64, GetParam(), size_t{4} << 20);
  const std::unique_ptr<Encoder> host = bucket.codec->NewEncoder();
  const std::unique_ptr<Encoder> on_device = *bucket.codec->NewDeviceEncoder(device.bucket());
  Tensors tensors(bucket, device);
  const std::unique_ptr<Accumulator> accumulator = bucket.codec->NewAccumulator();
  RoundPlan plan = bucket.codec->InitialPlan();
  const float rate = 0.5f;
  for (uint64_t round = 0; round < 3; ++round) {
    const FrameIdentity id = {1, 0, round, 77, {&rate, 1}};
    tensors.Add(GaussianGradient(3, kElements), round);
    const std::vector<RunInput> runs = tensors.OnDevice(round);
    if (round > 0) {
      // Enough for what is taken and for what the kernels need meanwhile, not for the cells, which are larger than
      // that.
      const size_t cells = uint64_t{plan.sketch_groups} * plan.cells_per_group * sizeof(int32_t);
      const size_t left = 2 * bucket.slice().elements * sizeof(uint32_t) + cells - 256;
      device.bucket()->Wait();
      void* const others = device.runtime().Allocate(device.runtime().FreeBytes() - left, device.bucket()->stream());
      ASSERT_NE(others, nullptr);
      EXPECT_EQ(on_device->Encode(id, plan, runs).status().code(), absl::StatusCode::kResourceExhausted);
      device.runtime().Free(others, device.bucket()->stream());
      tensors.ExpectSame();
      if (HasFatalFailure()) return;
    }
    const auto frame = on_device->Encode(id, plan, runs);
    const auto expected = host->Encode(id, plan, tensors.OnHost(round));
    ASSERT_TRUE(frame.ok() && expected.ok());
    ASSERT_EQ(Joined(frame->chunks), Joined(expected->chunks)) << "round " << round;
    tensors.ExpectSame();
    if (HasFatalFailure()) return;
    plan = PlanBehind(*expected, id, plan, *accumulator);
  }
}

INSTANTIATE_TEST_SUITE_P(Lags, DeviceEncoder, ::testing::Values(Lag::kLatest, Lag::kRandom),
                         [](const auto& info) { return info.param == Lag::kLatest ? "Latest" : "Random"; });

}  // namespace
}  // namespace gradwire::testing
