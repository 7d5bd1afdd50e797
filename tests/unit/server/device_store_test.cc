// Parameters on a device, here the host layer of tests/gpu, against those in host memory: the same bits after every
// update, from where the accumulator left it and from its frame alone.
#include "server/job/device_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "common/codec/select/select.h"
#include "server/job/job_arrays.h"
#include "tests/gpu/host/queued_device.h"

namespace gradwire {
namespace {

using kernels::cuda::DeviceShare;
using kernels::cuda::HostDeviceOptions;
using kernels::cuda::Lag;
using kernels::cuda::QueuedBackend;

// Three tensors of two parameter groups in one bucket: stretches of one group begin and end within it.
v1::JobSpec SpecOf(const std::string& codec, v1::OptimizerKind optimizer, float weight_decay,
                   const std::string& update_codec = "") {
  v1::JobSpec spec;
  spec.set_name("store");
  spec.set_codec(codec);
  spec.set_update_codec(update_codec);
  spec.set_max_workers(2);
  spec.set_run_elements(64);
  spec.mutable_optimizer()->set_kind(optimizer);
  for (const float momentum : {0.9f, 0.5f}) {
    v1::OptimizerGroup& group = *spec.mutable_optimizer()->add_groups();
    group.set_weight_decay(weight_decay * momentum);
    if (optimizer == v1::OPTIMIZER_SGD) group.set_momentum(momentum);
  }
  if (optimizer == v1::OPTIMIZER_STEP) spec.set_push(v1::PUSH_STEP);
  for (const uint32_t group : {0u, 1u, 0u}) {
    v1::TensorSpec& tensor = *spec.add_tensors();
    tensor.set_name("w" + std::to_string(spec.tensors_size()));
    tensor.add_shape(1000 + 37 * group);
    tensor.set_group(group);
  }
  return spec;
}

struct Arrays {
  explicit Arrays(uint64_t elements)
      : parameter(elements), first_moment(elements), second_moment(elements), update_residual(elements) {}
  ParameterTargets Targets() {
    return {parameter.data(), first_moment.data(), second_moment.data(), update_residual.data()};
  }
  bool operator==(const Arrays& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(parameter, other.parameter) && same(first_moment, other.first_moment) &&
           same(second_moment, other.second_moment) && same(update_residual, other.update_residual);
  }
  std::vector<float> parameter, first_moment, second_moment, update_residual;
};

class DeviceStoreTest : public ::testing::Test {
 protected:
  // One bucket, one shard; `copies` of its parameters and sums on the device.
  void Make(const v1::JobSpec& spec, size_t copies) {
    job_ = std::make_unique<Job>(*Job::Make(spec));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 1));
    ASSERT_EQ(layout_->bucket_count(), 1u);
    codecs_.clear();
    codecs_.push_back(*MakeCodec({job_.get(), &slice(), host_.get()}));
    const uint64_t bytes = DeviceBytes(*job_, slice(), codecs_[0].get());
    for (size_t i = 0; i < copies; ++i) {
      arrays_.push_back(*MakeDeviceArrays(job_.get(), layout_.get(), 0, codecs_, host_.get(), share_.get(), bytes));
      stores_.push_back(*arrays_.back()->NewStore(0));
      accumulators_.push_back(*arrays_.back()->NewAccumulator(0, *codecs_[0]));
    }
    EXPECT_EQ(share_->budget().used(), copies * bytes);
  }
  void Clear() {
    stores_.clear();
    accumulators_.clear();
    arrays_.clear();
    EXPECT_EQ(share_->budget().used(), 0u);
  }
  ~DeviceStoreTest() override { Clear(); }
  const BucketLayout& slice() const { return layout_->at(0, 0); }
  Arrays Read(ParameterStore& store) const {
    Arrays arrays(slice().elements);
    store.Read(arrays.Targets());
    return arrays;
  }
  std::vector<Bytes> Upload() const {
    std::vector<float> parameters(slice().elements);
    std::iota(parameters.begin(), parameters.end(), -500.0f);
    return EncodeInitialize(slice(), 1, parameters.data());
  }
  EncodedFrame Encode(uint64_t round, const RoundPlan& plan, std::span<const float> rates) {
    std::vector<float> pending(slice().elements);
    std::normal_distribution<float> normal;
    for (float& x : pending) x = normal(random_);
    const std::vector<float> gradient = pending;
    const Selection selection = SelectThreshold(*codecs_[0], round, pending, *host_);
    std::vector<RunInput> runs;
    for (size_t r = 0; r < slice().runs.size(); ++r) {
      runs.push_back({gradient.data() + slice().run_begin[r], pending.data() + slice().run_begin[r], selection});
    }
    return *codecs_[0]->NewEncoder()->Encode({0, 0, round, 1, rates}, plan, runs);
  }
  static void Merge(const EncodedFrame& frame, Accumulator& accumulator) {
    const std::vector<wire::Chunk> chunks = *wire::ParseFrame(frame.chunks);
    for (const wire::Chunk& chunk : chunks) {
      for (const wire::Segment& s : chunk.segments) {
        if (s.type == wire::SegmentType::kLearningRates) continue;
        ASSERT_TRUE(accumulator.Add(s).ok());
      }
    }
  }

  const std::unique_ptr<kernels::Backend> host_ = *kernels::MakeBackend("cpu");
  QueuedBackend backend_{"queued", HostDeviceOptions{.memory_bytes = 1 << 26}, Lag::kLatest};
  std::unique_ptr<DeviceShare> share_ = *DeviceShare::Make(&backend_, {.ring_slots = 2, .ring_slot_bytes = 512});
  std::mt19937_64 random_{7};
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  std::vector<std::unique_ptr<JobArrays>> arrays_;
  std::vector<std::unique_ptr<ParameterStore>> stores_;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
};

TEST_F(DeviceStoreTest, AppliesUpdatesAsTheHostDoes) {
  const std::pair<v1::OptimizerKind, float> optimizers[] = {{v1::OPTIMIZER_SGD, 0.1f},
                                                            {v1::OPTIMIZER_ADAMW, 0.1f},
                                                            {v1::OPTIMIZER_STEP, 0.0f},
                                                            {v1::OPTIMIZER_STEP, 0.1f},
                                                            {v1::OPTIMIZER_NONE, 0.0f}};
  const std::pair<const char*, const char*> codecs[] = {{"dense:fp32", ""},
                                                        {"dense:bf16", ""},
                                                        {"dense:fixed32", ""},
                                                        {"dense:fixed16", ""},
                                                        {"tagc:density=0.1", ""},
                                                        {"tagc:density=0.1,form=sketch", ""},
                                                        {"dense:fp32", "topk:density=0.1,values=int8"},
                                                        {"dense:fixed32", "fp16"},
                                                        {"tagc:density=0.1", "union:values=int4"},
                                                        {"tagc:density=0.1", "qsgd:bits=4"},
                                                        {"topk:density=0.1,values=int8", "union:values=int4"}};
  for (const auto& [codec, update_codec] : codecs) {
    for (const auto& [optimizer, decay] : optimizers) {
      SCOPED_TRACE(absl::StrCat(codec, " and ", update_codec, ", optimizer ", static_cast<int>(optimizer)));
      Make(SpecOf(codec, optimizer, decay, update_codec), 2);
      const std::unique_ptr<ParameterStore> host = *MakeHostStore(job_.get(), &slice(), host_.get());
      const std::unique_ptr<Accumulator> sums = codecs_[0]->NewAccumulator();
      if (job_->keeps_parameters()) {
        for (ParameterStore* store : {host.get(), stores_[0].get(), stores_[1].get()}) {
          ASSERT_TRUE(store->Initialize(Upload()).ok());
        }
      }
      RoundPlan plan = codecs_[0]->InitialPlan();
      for (uint64_t round = 0; round < 4; ++round) {
        const std::vector<float> rates = {0.1f, 0.01f * static_cast<float>(round)};
        const EncodedFrame frame = Encode(round, plan, rates);
        for (Accumulator* a : {sums.get(), accumulators_[0].get()}) {
          a->Open(round, plan);
          Merge(frame, *a);
        }
        const FrameIdentity id = {0, 0, round, 0, rates};
        UpdateFrame update = *sums->Finish(id, 1);
        UpdateFrame resident = *accumulators_[0]->Finish(id, 1);
        ASSERT_TRUE(host->Compress(plan, &update).ok());
        ASSERT_TRUE(stores_[0]->Compress(plan, &resident).ok());
        if (!update.mean.empty()) {
          ASSERT_TRUE(stores_[1]->ReplayCompression(plan, update).ok());
        }
        ASSERT_TRUE(host->Apply(update, plan).ok());
        ASSERT_TRUE(stores_[0]->Apply(resident, plan).ok());
        ASSERT_TRUE(stores_[1]->Apply(update, plan).ok());  // as recovery does: the device never merged it
        plan = update.next;
        const Arrays expected = Read(*host);
        EXPECT_TRUE(Read(*stores_[0]) == expected) << "round " << round;
        EXPECT_TRUE(Read(*stores_[1]) == expected) << "round " << round << ", from the frame";
        for (const auto content : {ParameterContent::kFloat32, ParameterContent::kBf16, ParameterContent::kState,
                                   ParameterContent::kShard}) {
          const std::vector<Bytes> a = host->Serialize(PlanWindow(1, round + 1, {plan}), content).Take();
          const std::vector<Bytes> b = stores_[0]->Serialize(PlanWindow(1, round + 1, {plan}), content).Take();
          ASSERT_EQ(a.size(), b.size());
          for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(std::ranges::equal(a[i].span(), b[i].span()));
        }
      }
      Clear();
    }
  }
}

TEST_F(DeviceStoreTest, LoadsWhatItRead) {
  Make(SpecOf("dense:fp32", v1::OPTIMIZER_ADAMW, 0, "topk:density=0.1"), 1);
  EXPECT_TRUE(Read(*stores_[0]) == Arrays(slice().elements)) << "not zero at the start";
  Arrays arrays(slice().elements);
  std::iota(arrays.parameter.begin(), arrays.parameter.end(), 1.0f);
  std::iota(arrays.first_moment.begin(), arrays.first_moment.end(), 2.0f);
  std::iota(arrays.second_moment.begin(), arrays.second_moment.end(), 3.0f);
  std::iota(arrays.update_residual.begin(), arrays.update_residual.end(), 4.0f);
  stores_[0]->Load({arrays.parameter.data(), arrays.first_moment.data(), arrays.second_moment.data(),
                    arrays.update_residual.data()});
  EXPECT_TRUE(Read(*stores_[0]) == arrays);
}

TEST_F(DeviceStoreTest, JobThatDoesNotFitTheBudgetIsRefusedWithTheFigures) {
  Make(SpecOf("tagc:density=0.1", v1::OPTIMIZER_ADAMW, 0), 1);
  const uint64_t bytes = DeviceBytes(*job_, slice(), codecs_[0].get());
  const uint64_t left = share_->memory_limit_bytes() - share_->budget().used();
  const auto refused = MakeDeviceArrays(job_.get(), layout_.get(), 0, codecs_, host_.get(), share_.get(), left + 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr(std::to_string(left + 1)));
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr(std::to_string(left)));
  const auto too_small =
      MakeDeviceArrays(job_.get(), layout_.get(), 0, codecs_, host_.get(), share_.get(), bytes - 256);
  ASSERT_TRUE(too_small.ok());
  const auto store = (*too_small)->NewStore(0);
  EXPECT_FALSE(store.ok() && (*too_small)->NewAccumulator(0, *codecs_[0]).ok())
      << "it takes more than DeviceBytes says";
}

}  // namespace
}  // namespace gradwire
