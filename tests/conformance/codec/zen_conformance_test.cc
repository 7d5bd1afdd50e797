// What ZEN's codec promises beyond the suite (algorithms.md, section 2; arXiv 2309.13254): lossless pushes, even shares
// of skewed gradients, and messages of the sizes that its equations count with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "common/job/codec_spec.h"
#include "tests/conformance/codec/sharded_round.h"

namespace gradwire::testing {
namespace {

constexpr uint64_t kDim = 64;

// The gradient of an embedding of `rows` rows: those of so many tokens, drawn by Zipf's law, are not 0.
std::vector<float> EmbeddingGradient(uint64_t rows, int tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<double> weights(rows);
  for (uint64_t i = 0; i < rows; ++i) weights[i] = 1.0 / static_cast<double>(i + 1);
  std::discrete_distribution<uint64_t> zipf(weights.begin(), weights.end());
  std::normal_distribution<float> normal(0, 0.01f);
  std::vector<float> gradient(rows * kDim);
  for (int t = 0; t < tokens; ++t) {
    const uint64_t row = zipf(random);
    for (uint64_t i = 0; i < kDim; ++i) gradient[row * kDim + i] += normal(random);
  }
  return gradient;
}

uint64_t NonZeroBytes(const std::vector<float>& gradient) {
  return sizeof(float) *
         static_cast<uint64_t>(std::count_if(gradient.begin(), gradient.end(), [](float x) { return x != 0; }));
}

// Every element with the same probability.
std::vector<float> EvenGradient(uint64_t elements, double density, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> gradient(elements);
  for (float& x : gradient) {
    if (static_cast<double>(random() >> 11) * 0x1p-53 < density) x = 1.0f + static_cast<float>(random() % 1024);
  }
  return gradient;
}

std::vector<bool> NonZeros(const std::vector<float>& gradient) {
  std::vector<bool> there(gradient.size());
  for (size_t i = 0; i < there.size(); ++i) there[i] = gradient[i] != 0;
  return there;
}

uint64_t Sum(const std::vector<uint64_t>& values) {
  uint64_t sum = 0;
  for (const uint64_t value : values) sum += value;
  return sum;
}

// Of the frame of one worker, and of the update.
struct Sizes {
  uint64_t push = 0;
  uint64_t update = 0;
};
Sizes SizesOf(const std::string& codec, const std::vector<float>& gradient, uint32_t shards = 1) {
  ShardedRound round({codec, gradient.size(), shards});
  const ShardedResult result = round.Exchange({gradient});
  return {Sum(result.push_bytes[0]), Sum(result.update_bytes)};
}

// A row is one stretch of positions, or two where shards have parts of it.
TEST(Zen, RowsTakeHardlyMoreThanTheirValues) {
  const std::vector<float> gradient = EmbeddingGradient(20'000, 2000, 3);
  const uint64_t values = NonZeroBytes(gradient);
  for (const uint32_t shards : {1u, 3u}) {
    const Sizes sizes = SizesOf("zen:run=64", gradient, shards);
    EXPECT_LE(sizes.push, values + values / 40 + shards * 2000) << shards;
    EXPECT_LE(sizes.update, values + values / 40 + shards * 2000) << shards;
  }
}

TEST(Zen, EightThreadsPushWithoutLoss) {
  constexpr uint64_t kRows = 3000;
  for (const std::string index : {"smallest", "auto", "coo", "bitmap"}) {
    std::vector<std::vector<float>> gradients;
    for (uint64_t w = 0; w < 8; ++w) gradients.push_back(EmbeddingGradient(kRows, 2000, w));
    const ShardedResult dense = ShardedRound({"dense:fp32", kRows * kDim, 3, 8}).Exchange(gradients);
    const ShardedResult zen = ShardedRound({"zen:index=" + index, kRows * kDim, 3, 8}).Exchange(gradients);
    EXPECT_TRUE(zen.mean == dense.mean) << index;
    std::vector<bool> all(kRows * kDim);
    for (const auto& gradient : gradients) {
      for (size_t i = 0; i < all.size(); ++i) all[i] = all[i] || gradient[i] != 0;
    }
    EXPECT_EQ(Sum(zen.update_elements), static_cast<uint64_t>(std::count(all.begin(), all.end(), true)));
  }
}

// Both sides of a message know which elements a shard owns, in which order, from the job alone.
TEST(Zen, ShardsOwnTheSameElementsForEveryone) {
  const ShardedRound one({"zen", 100'000, 5});
  const ShardedRound other({"zen", 100'000, 5});
  const ShardedRound another({"zen", 100'000, 5, 1, 4096, 2});
  EXPECT_EQ(one.layout().digest(), other.layout().digest());
  EXPECT_NE(one.layout().digest(), another.layout().digest()) << "another seed, another map: refused by its digest";
}

TEST(Zen, SharesOfSkewedGradientsAreEven) {
  constexpr uint64_t kRows = 30'000;
  const std::vector<float> gradient = EmbeddingGradient(kRows, 20'000, 1);
  const std::vector<bool> there = NonZeros(gradient);
  for (uint32_t shards : {2, 4, 8, 16, 32, 64}) {
    const std::string codec = shards <= 16 ? "zen" : "zen:run=4";
    EXPECT_LE(ImbalanceOf(ShardedRound({codec, gradient.size(), shards}).CountPerShard(there)), 1.1) << shards;
  }
  std::vector<uint64_t> even(8);
  for (size_t i = 0; i < there.size(); ++i) even[i * 8 / there.size()] += there[i];
  EXPECT_GE(ImbalanceOf(even), 2.5);
}

// Runs of long tensors leave loads behind that are not even; the first rows, which everybody uses, must not fill them.
TEST(Zen, HotRowsDoNotEvenOutTheLoadsOfOtherTensors) {
  v1::JobSpec spec;
  spec.set_name("two");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec("dense:fp32");
  auto* rule = spec.add_rules();
  rule->set_pattern("embedding*");
  rule->set_codec("zen");
  const auto add = [&spec](const std::string& name, uint64_t elements) {
    auto* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->add_shape(elements);
  };
  add("embedding.weight", 64'000);
  add("mlp.weight", 4096 * 5);  // one run too many
  const auto job = Job::Make(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const auto layout = Layout::Make(*job, 4);
  ASSERT_TRUE(layout.ok());
  std::vector<uint64_t> hot(4);
  for (uint32_t b = 0; b < layout->bucket_count(); ++b) {
    for (uint32_t s = 0; s < 4; ++s) {
      for (const gradwire::Run& run : layout->at(b, s).runs)
        hot[s] += run.tensor == 0 && run.offset < 4096 ? run.length : 0;
    }
  }
  EXPECT_EQ(hot, std::vector<uint64_t>(4, 1024));
}

// Whatever the number of shards, the bitmaps of all together have one bit for each element, and padding.
TEST(Zen, BitmapsTakeOneBitPerElementOverAllShards) {
  const std::vector<float> gradient = EvenGradient(500'000, 0.1, 1);
  const uint64_t values =
      4 * static_cast<uint64_t>(std::count_if(gradient.begin(), gradient.end(), [](float x) { return x != 0; }));
  for (uint32_t shards : {1, 2, 7, 64}) {
    const Sizes sizes = SizesOf("zen:index=bitmap", gradient, shards);
    // Of a shard: chunk header, learning rate, and for each 65536 elements a segment header, the length of the index,
    // and less than 1 + 7 bytes of padding. Here all of it is one chunk.
    const uint64_t segments = (gradient.size() / shards + 65535) / 65536;
    const uint64_t most = shards * (64 + 32 + segments * (24 + 4 + 8));
    for (const uint64_t bytes : {sizes.push, sizes.update}) {
      EXPECT_GE(bytes, values + gradient.size() / 8);
      EXPECT_LE(bytes, values + gradient.size() / 8 + most + 3 * 64) << shards << " shards";
    }
  }
}

TEST(Zen, SizesCrossAtOneInThirtyTwoAndAtOneHalf) {
  constexpr uint64_t kElements = 1 << 20;
  const uint64_t dense = SizesOf("dense:fp32", std::vector<float>(kElements)).push;
  for (double density : {0.001, 0.01, 0.028, 0.035, 0.1, 0.45, 0.499}) {
    SCOPED_TRACE(density);
    const std::vector<float> gradient = EvenGradient(kElements, density, 3);
    const uint64_t coo = SizesOf("zen:index=coo", gradient).push;
    const uint64_t bitmap = SizesOf("zen:index=bitmap", gradient).push;
    const uint64_t chosen = SizesOf("zen:index=auto", gradient).push;
    EXPECT_EQ(coo < bitmap, density < 1.0 / 32);
    EXPECT_EQ(chosen, std::min(coo, bitmap));
    EXPECT_LE(SizesOf("zen", gradient).push, chosen);
    EXPECT_NEAR(static_cast<double>(coo) / static_cast<double>(dense), 2 * density, 0.012 * density + 2e-4);
  }
  EXPECT_LT(SizesOf("zen:index=coo", EvenGradient(kElements, 0.49, 3)).push, dense);
  EXPECT_GT(SizesOf("zen:index=coo", EvenGradient(kElements, 0.51, 3)).push, dense);
  EXPECT_LT(SizesOf("zen:index=auto", EvenGradient(kElements, 0.51, 3)).push, dense);
}

TEST(Zen, AnEmptyPushIsAPush) {
  constexpr uint64_t kElements = 50'000;
  std::vector<std::vector<float>> gradients = {EvenGradient(kElements, 0.01, 1), std::vector<float>(kElements)};
  for (const std::string codec : {"zen", "zen:index=coo", "zen:index=bitmap"}) {
    const ShardedResult result = ShardedRound({codec, kElements, 2, 2}).Exchange(gradients);
    for (uint64_t i = 0; i < kElements; ++i) ASSERT_EQ(result.mean[i], gradients[0][i] / 2) << i;
    EXPECT_LE(Sum(result.push_bytes[1]), 2 * (64 + 32 + 32));
  }
}

}  // namespace
}  // namespace gradwire::testing
