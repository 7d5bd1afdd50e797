// Both kinds of sums hold the same, and that of pages holds no more than was touched.
#include "common/codec/sparse/sums.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace gradwire::sparse {
namespace {

using ::testing::HasSubstr;

class SparseSumsTest : public ::testing::Test {
 protected:
  void Prepare(uint64_t elements, uint32_t workers) {
    v1::JobSpec spec;
    spec.set_name("unit");
    spec.add_tensors()->set_name("table");
    spec.mutable_tensors(0)->add_shape(elements);
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec("zen");
    spec.set_bucket_bytes(1 << 30);
    spec.set_max_workers(workers);
    job_ = std::make_unique<Job>(*Job::Make(spec));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 1));
    context_ = {job_.get(), &layout_->at(0, 0), backend_.get()};
  }
  Pairs RandomPairs(uint32_t from, uint32_t to, uint32_t one_of) {
    Pairs pairs;
    for (uint32_t i = from; i < to; ++i) {
      if (random_() % one_of != 0) continue;
      pairs.positions.push_back(i);
      pairs.values.push_back((static_cast<float>(random_() % 20001) - 10000.0f) / 1024);
    }
    return pairs;
  }

  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  CodecContext context_;
  std::mt19937 random_{5};
};

TEST_F(SparseSumsTest, AreTheSameByPageAndAsAWhole) {
  constexpr uint32_t kElements = 5003, kFrames = 3;
  Prepare(kElements, kFrames);
  WholeSums whole(context_);
  PagedSums paged(context_);
  for (int round = 0; round < 200; ++round) {
    std::vector<Pairs> frames;
    for (uint32_t w = 0; w < kFrames; ++w) {
      const uint32_t from = static_cast<uint32_t>(random_() % kElements);
      const uint32_t to = from + static_cast<uint32_t>(random_() % (kElements - from));
      frames.push_back(RandomPairs(from, to, 1 + static_cast<uint32_t>(random_() % 200)));
      ASSERT_TRUE(whole.Add(frames.back()).ok());
      ASSERT_TRUE(paged.Add(frames.back()).ok());
      if (random_() % 4 != 0) continue;
      whole.Remove(frames.back());
      paged.Remove(frames.back());
    }
    const std::vector<uint32_t> positions = whole.Union();
    ASSERT_EQ(paged.Union(), positions) << round;
    ASSERT_EQ(paged.Total(), whole.Total());
    std::vector<float> a(kElements), b(kElements);
    whole.Means(0, kElements, kFrames, a.data());
    paged.Means(0, kElements, kFrames, b.data());
    ASSERT_EQ(a, b);
    if (round % 5 == 4) {  // a round that nobody closes
      whole.Clear();
      paged.Clear();
      continue;
    }
    a.resize(positions.size());
    b.resize(positions.size());
    whole.TakeMeans(positions, kFrames, a.data());
    paged.TakeMeans(positions, kFrames, b.data());
    ASSERT_EQ(a, b);
    whole.Clear();
    paged.Clear();
    ASSERT_TRUE(paged.Union().empty());
  }
}

TEST_F(SparseSumsTest, RefuseWhatDoesNotFitAndStayAsTheyWere) {
  Prepare(1000, 3);
  PagedSums paged(context_);
  Pairs pairs{{10, 500, 501, 990}, {1, 2, 3, 4}};
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(paged.Add({{501}, {1.0f}}).ok());
  const absl::Status often = paged.Add(pairs);
  EXPECT_THAT(std::string(often.message()), HasSubstr("element 501 was sent by more workers"));
  EXPECT_EQ(paged.Union(), (std::vector<uint32_t>{501}));
  EXPECT_EQ(paged.Total(), 3u);
  pairs.positions[2] = 502;
  pairs.values[3] = 1e9f;
  EXPECT_THAT(std::string(paged.Add(pairs).message()), HasSubstr("element 990"));
  EXPECT_EQ(paged.Union(), (std::vector<uint32_t>{501}));
  std::vector<float> mean(1);
  paged.TakeMeans(paged.Union(), 3, mean.data());
  EXPECT_EQ(mean[0], 1.0f);
}

TEST_F(SparseSumsTest, HoldWhatIsTouched) {
  constexpr uint32_t kElements = 1 << 20;
  Prepare(kElements, 2);
  PagedSums paged(context_);
  const size_t empty = paged.memory_bytes();
  EXPECT_LT(empty, kElements / 8);
  for (int round = 0; round < 50; ++round) {  // other rows each time: pages are used again
    const uint32_t row = static_cast<uint32_t>(random_() % (kElements / 64));
    ASSERT_TRUE(paged.Add(RandomPairs(64 * row, 64 * row + 64, 1)).ok());
    std::vector<float> means(64);
    paged.TakeMeans(paged.Union(), 2, means.data());
  }
  EXPECT_LT(paged.memory_bytes() - empty, 32'000u);
  ASSERT_TRUE(paged.Add(RandomPairs(0, kElements, 1)).ok());
  EXPECT_LE(paged.memory_bytes(), PagedSums::MostBytes(context_));
}

}  // namespace
}  // namespace gradwire::sparse
