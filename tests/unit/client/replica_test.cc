// The worker's copy of the parameters: gathered, loaded and digested slice by slice.
#include "client/cpp/internal/replica.h"

#include <memory>
#include <numeric>

#include "common/base/sha256.h"
#include "common/codec/frame/parameters.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace gradwire::client {
namespace {

TEST(Replica, SlicesCarryEveryElementOnce) {
  v1::JobSpec spec;
  spec.set_name("unit");
  for (uint64_t elements : {1000, 1, 77}) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name("t" + std::to_string(elements));
    tensor->add_shape(elements);
  }
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.set_run_elements(64);
  spec.set_bucket_bytes(1024);
  auto job = Job::Make(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  auto layout = Layout::Make(*job, 3);
  ASSERT_TRUE(layout.ok());
  auto backend = kernels::MakeBackend("cpu");
  ASSERT_TRUE(backend.ok());
  std::vector<std::vector<float>> source;
  std::vector<std::vector<float>> target;
  std::vector<std::span<float>> source_memory;
  std::vector<std::span<float>> target_memory;
  float next = 1;
  for (const Tensor& tensor : job->tensors()) {
    source.emplace_back(tensor.elements);
    target.emplace_back(tensor.elements);
    for (float& x : source.back()) x = next++;
  }
  for (size_t t = 0; t < source.size(); ++t) {
    source_memory.push_back(source[t]);
    target_memory.push_back(target[t]);
  }
  const Replica from(&*job, &*layout, MakeHostMemory(backend->get()), source_memory, false);
  Replica to(&*job, &*layout, MakeHostMemory(backend->get()), target_memory, false);
  EXPECT_NE(from.Digest(), to.Digest());
  Sha256 shard_one;
  for (uint32_t b = 0; b < layout->bucket_count(); ++b) {
    for (uint32_t s = 0; s < 3; ++s) {
      const BucketLayout& slice = layout->at(b, s);
      const std::vector<float> values = from.Gather(slice);
      if (s == 1) shard_one.Update(std::span<const float>(values));
      ParameterArrays arrays;
      arrays.parameter = values.data();
      const std::vector<wire::Chunk> frame = *wire::ParseFrame(
          EncodeParameters(slice, PlanWindow(1, 5, {RoundPlan()}), ParameterContent::kFloat32, arrays));
      const auto plan = to.Load(slice, frame, 5);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_FALSE(to.Load(slice, frame, 6).ok()) << "another version";
    }
  }
  EXPECT_EQ(source, target);
  EXPECT_EQ(from.Digest(), to.Digest());
  EXPECT_EQ(to.ShardDigest(1), shard_one.Hex());
}

}  // namespace
}  // namespace gradwire::client
