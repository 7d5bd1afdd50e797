#include "server/job/lent_array.h"

#include <gtest/gtest.h>

#include <span>
#include <thread>
#include <vector>

#include "common/codec/frame/parameters.h"
#include "common/wire/frame.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;
using testing_support::TestJob;

TEST(LentArray, StaysWhereItIsUnlessSomebodyReads) {
  LentArray array(1000);
  float* const before = array.Own();
  before[0] = 1.0f;
  auto lent = array.Lend(), again = array.Lend();
  EXPECT_EQ(array.data(), before) << "lending copies nothing";
  lent.reset();
  again.reset();
  EXPECT_EQ(array.Own(), before);
}

TEST(LentArray, WhatIsLentKeepsItsValues) {
  LentArray array(1000);
  array.Own()[7] = 1.0f;
  const float* const first = array.data();
  const auto lent = array.Lend();
  float* const second = array.Own();
  ASSERT_NE(second, first);
  second[7] = 2.0f;
  EXPECT_EQ(first[7], 1.0f);
  EXPECT_EQ(array.Own(), second) << "nobody reads the copy";
  const auto later = array.Lend();
  array.Own()[7] = 3.0f;
  EXPECT_EQ(first[7], 1.0f);
  EXPECT_EQ(second[7], 2.0f);
  EXPECT_EQ(array.data()[7], 3.0f);
}

TEST(LentArray, IsReadByOthersWhileItChanges) {
  LentArray array(4096);
  std::vector<std::thread> readers;
  for (int round = 0; round < 50; ++round) {
    readers.emplace_back([lent = array.Lend(), values = array.data(), round]() mutable {
      for (int i = 0; i < 4096; ++i) ASSERT_EQ(values[i], static_cast<float>(round));
      lent.reset();
    });
    float* const values = array.Own();
    for (int i = 0; i < 4096; ++i) values[i] = static_cast<float>(round + 1);
  }
  for (std::thread& reader : readers) reader.join();
}

TEST(LentArray, MayBeEmpty) {
  LentArray array(0);
  const auto lent = array.Lend();
  array.Own();
  EXPECT_EQ(array.size(), 0u);
}

// A frame that is on its way while the parameters change is of the version that was asked for.
TEST(LentArray, FramesOfAVersionOutliveIt) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_bucket_bytes(1 << 20);
  spec.mutable_tensors(spec.tensors_size() - 1)->clear_shape();
  spec.mutable_tensors(spec.tensors_size() - 1)->add_shape(100001);
  TestJob job(spec);
  const auto member = job.Join("a");
  job.Initialize(*member, 1.0f);
  BucketState& bucket = job.bucket(0);
  absl::MutexLock lock(&bucket.mu);
  wire::FrameToSend lent = bucket.store->Serialize(bucket.plans, ParameterContent::kState);
  const std::vector<Bytes> copied = bucket.store->Serialize(bucket.plans, ParameterContent::kShard).Take();
  const std::vector<float> later(bucket.layout->elements, 5.0f);
  bucket.store->Load({.parameter = later.data(), .first_moment = later.data()});
  std::vector<float> read(bucket.layout->elements);
  bucket.store->Read({.parameter = read.data()});
  EXPECT_EQ(read, later);
  const std::vector<Bytes> frame = std::move(lent).Take();  // what is lent is read now
  for (const auto* const sent : {&frame, &copied}) {
    std::vector<Bytes> chunks;
    for (std::span<const Bytes> left = *sent; !left.empty(); left = left.subspan(wire::PiecesOfChunk(left)))
      chunks.push_back(wire::Flatten(left.first(wire::PiecesOfChunk(left))));
    EXPECT_EQ(chunks.size() < sent->size(), sent == &frame) << "what is kept for long is copied";
    std::vector<float> values(bucket.layout->elements);
    const auto plans = DecodeParameters(chunks, job.parts().job, *bucket.layout, 0, {.parameter = values.data()});
    ASSERT_TRUE(plans.ok()) << plans.status();
    EXPECT_EQ(values, std::vector<float>(values.size(), 1.0f));
  }
}

}  // namespace
}  // namespace gradwire
