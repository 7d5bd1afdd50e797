// What the training loop gives to a round: refusals, readiness, and which buckets are complete with a tensor.
#include "client/cpp/internal/round_input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace gradwire::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Tensors of sizes from nothing to several buckets, in two parameter groups.
Job MakeJob(const std::vector<uint64_t>& sizes = {3, 700, 0, 5000, 1, 1, 64, 2000, 12}) {
  v1::JobSpec spec;
  spec.set_name("input");
  for (uint64_t size : sizes) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", spec.tensors_size()));
    tensor->add_shape(size);
    tensor->set_group(size > 100 ? 1 : 0);
  }
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.mutable_optimizer()->add_groups();
  spec.mutable_optimizer()->add_groups();
  spec.set_codec("dense:values=fp32");
  spec.set_min_workers(1);
  spec.set_bucket_bytes(4096);
  spec.set_run_elements(256);
  absl::StatusOr<Job> job = Job::Make(spec);
  EXPECT_TRUE(job.ok()) << job.status();
  return *std::move(job);
}

TEST(RatesTest, AreOneForAllOrOneForEachGroup) {
  const Job job = MakeJob();
  EXPECT_THAT(RatesOf(job, std::vector<float>{0.5f}).value(), ElementsAre(0.5f, 0.5f));
  EXPECT_THAT(RatesOf(job, std::vector<float>{0.5f, 2}).value(), ElementsAre(0.5f, 2));
  for (const std::vector<float>& bad :
       {std::vector<float>{}, {1, 2, 3}, {std::numeric_limits<float>::infinity()}, {1, std::nanf("")}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(RatesOf(job, bad).status()));
  }
}

TEST(ReadyTensorsTest, TakesEachTensorOnce) {
  const Job job = MakeJob();
  const float gradient = 0;
  ReadyTensors ready(&job);
  EXPECT_FALSE(ready.All());
  ready.Open();
  EXPECT_TRUE(ready.Note(3, &gradient).ok());
  EXPECT_TRUE(ready.Note(0, &gradient).ok());
  EXPECT_TRUE(ready.Has(3) && ready.Has(0) && !ready.Has(1) && !ready.Has(1000));
  EXPECT_THAT(ready.order(), ElementsAre(3, 0));
  EXPECT_THAT(std::string(ready.Note(3, &gradient).message()), HasSubstr("'t4' was reported ready twice"));
  EXPECT_THAT(std::string(ready.Note(9, &gradient).message()), HasSubstr("the job has 9 tensors"));
  EXPECT_THAT(std::string(ready.Note(1, nullptr).message()), HasSubstr("'t2': the gradient is a null pointer"));
  EXPECT_FALSE(ready.Has(1)) << "what is refused may come again";
  EXPECT_THAT(std::string(ready.CheckAll().message()), HasSubstr("the gradient of tensor 't2'"));
  for (uint32_t t : {1u, 4u, 5u, 6u, 7u, 8u}) {
    EXPECT_FALSE(ready.All());
    EXPECT_TRUE(ready.Note(t, &gradient).ok());
  }
  EXPECT_TRUE(ready.All());
  EXPECT_TRUE(ready.CheckAll().ok()) << "a tensor without elements need not be reported";
  EXPECT_TRUE(ready.Note(2, nullptr).ok());
  EXPECT_TRUE(ready.All());
  ready.Open();
  EXPECT_FALSE(ready.Has(3));
  EXPECT_FALSE(ready.All());
  ready.Open(/*all=*/true);
  EXPECT_TRUE(ready.All());
  EXPECT_TRUE(ready.CheckAll().ok());
  EXPECT_TRUE(ready.order().empty());
}

TEST(TurnsTest, SmallTensorsFirstAndThenInTheOrderOfBackward) {
  const Job job = MakeJob({3, 20'000, 64, 70'000, 16'384, 16'385, 1});
  const Layout layout = *Layout::Make(job, 2);
  const Turns turns(job, layout);
  EXPECT_THAT(turns.of_tensor, ElementsAre(0, 1, 0, 1, 0, 1, 0));
  std::vector<std::pair<uint32_t, uint32_t>> order;  // turn, bucket
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) order.emplace_back(turns.of_bucket[b], b);
  std::sort(order.begin(), order.end());
  const auto is_small = [&](uint32_t bucket) {
    return std::ranges::all_of(layout.parts(bucket),
                               [&](const BucketPart& part) { return job.tensors()[part.tensor].elements <= 16'384; });
  };
  size_t small = 0;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) small += is_small(b) ? 1 : 0;
  ASSERT_GT(small, 1u);
  ASSERT_LT(small + 3, order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(is_small(order[i].second), i < small);
    if (i != 0 && i != small) {
      EXPECT_LT(order[i - 1].second, order[i].second) << "buckets are numbered in backward order";
    }
  }
}

TEST(BucketCountdownTest, ABucketIsCompleteWithTheLastOfItsTensors) {
  const Job job = MakeJob();
  const absl::StatusOr<Layout> layout = Layout::Make(job, 2);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::map<uint32_t, std::set<uint32_t>> tensors_of_bucket;
  for (uint32_t b = 0; b < layout->bucket_count(); ++b)
    for (const BucketPart& part : layout->parts(b)) tensors_of_bucket[b].insert(part.tensor);
  ASSERT_GT(tensors_of_bucket.size(), 3u);
  BucketCountdown countdown(job, *layout);
  std::mt19937 random(3);
  std::vector<uint32_t> order(job.tensors().size());
  for (uint32_t t = 0; t < order.size(); ++t) order[t] = t;
  for (int round = 0; round < 20; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    countdown.Reset();
    std::set<uint32_t> ready;
    for (uint32_t tensor : order) {
      ready.insert(tensor);
      std::vector<uint32_t> expected;
      for (const auto& [bucket, tensors] : tensors_of_bucket)
        if (tensors.contains(tensor) && std::includes(ready.begin(), ready.end(), tensors.begin(), tensors.end()))
          expected.push_back(bucket);
      EXPECT_EQ(countdown.Complete(tensor), expected);
    }
  }
}

}  // namespace
}  // namespace gradwire::client
