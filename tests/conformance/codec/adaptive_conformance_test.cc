// What the adaptive codec promises beyond the suite: dense float32's values, bit for bit, in the fewest bytes of all
// its forms, whatever the workers have; and that it says why.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/conformance/codec/codec_harness.h"
#include "tests/conformance/codec/sharded_round.h"

namespace gradwire::testing {
namespace {

constexpr uint64_t kElements = 1 << 17;

// `overlap`: the part of a worker's non-zeros that are those of all workers; the rest are its own.
std::vector<std::vector<float>> Gradients(uint32_t workers, double density, double overlap, uint64_t seed) {
  std::vector<std::vector<float>> gradients(workers, std::vector<float>(kElements));
  std::mt19937_64 common(seed), own(seed + 1);
  const auto draw = [](std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; };
  for (uint64_t i = 0; i < kElements; ++i) {
    const bool shared = draw(common) < overlap;
    const double chance = draw(common);
    for (auto& gradient : gradients) {
      if ((shared ? chance : draw(own)) < density) gradient[i] = static_cast<float>(own() % 4096 + 1) * 0x1p-12f;
    }
  }
  return gradients;
}

TEST(Adaptive, TakesTheFewestBytes) {
  for (const uint32_t workers : {2, 5, 16}) {
    for (const double overlap : {0.0, 0.5, 1.0}) {
      for (const double density : {0.0001, 0.003, 0.02, 0.05, 0.3, 0.9, 0.96, 0.98, 1.0}) {
        SCOPED_TRACE(::testing::Message() << workers << " workers, density " << density << ", overlap " << overlap);
        const auto gradients = Gradients(workers, density, overlap, 1);
        const auto exchange = [&](const std::string& codec) {
          return ShardedRound({codec, kElements, 1, workers}).Exchange(gradients);
        };
        const ShardedResult adaptive = exchange("adaptive");
        const ShardedResult dense = exchange("dense:fp32");
        EXPECT_TRUE(adaptive.mean == dense.mean) << "the form changes no bit of the mean";
        uint64_t push = dense.push_bytes[0][0], update = dense.update_bytes[0];
        for (const char* codec : {"zen:index=coo", "zen:index=bitmap", "zen:index=smallest"}) {
          const ShardedResult other = exchange(codec);
          push = std::min(push, other.push_bytes[0][0]);
          update = std::min(update, other.update_bytes[0]);
        }
        EXPECT_LE(adaptive.push_bytes[0][0], push + push / 100);
        EXPECT_LE(adaptive.update_bytes[0], update + update / 100);

        const Traffic& traffic = adaptive.traffic[0];
        EXPECT_EQ(traffic.contributors, workers);
        EXPECT_EQ(traffic.dense_update, adaptive.update_bytes[0] == dense.update_bytes[0]);
        EXPECT_NEAR(traffic.density(), density, 0.1 * density + 1e-4);
        if (overlap == 1) {
          EXPECT_EQ(traffic.gamma(), 1);
        } else if (overlap == 0 && density <= 0.003) {
          EXPECT_NEAR(traffic.gamma(), workers, 0.05 * workers);
        }
      }
    }
  }
}

TEST(Adaptive, SaysWhatTheOtherFormsTake) {
  constexpr double kHeaders = 2 * (64 + 32 + 24 + 4 + 8);  // of a push and an update in one segment
  for (const double density : {0.003, 0.02, 0.1, 0.45}) {
    SCOPED_TRACE(density);
    const auto gradients = Gradients(4, density, 0.5, 2);
    const auto bytes = [&](const std::string& codec) {
      const ShardedResult result = ShardedRound({codec, kElements, 1, 4}).Exchange(gradients);
      double push = 0;
      for (const auto& shards : result.push_bytes) push += static_cast<double>(shards[0]) / 4;
      return push + static_cast<double>(result.update_bytes[0]);
    };
    const Traffic traffic = ShardedRound({"adaptive", kElements, 1, 4}).Exchange(gradients).traffic[0];
    const FormBytes forms = BytesOfForms(traffic);
    EXPECT_NEAR(forms.dense, bytes("dense:fp32"), 0.01 * forms.dense);
    if (density * traffic.gamma() < 0.5) {
      EXPECT_NEAR(forms.coordinates, bytes("zen:index=coo"), 0.03 * forms.coordinates);
    }
    EXPECT_NEAR(forms.bitmap, bytes("zen:index=bitmap"), 0.02 * forms.bitmap);
    EXPECT_NEAR(forms.gaps, bytes("zen"), 0.03 * forms.gaps + kHeaders);
    EXPECT_GT(forms.sketch, forms.gaps);
  }
}

// Cells hold the union, and more of them than it has elements: values and an index are always less.
TEST(Adaptive, ASketchNeverTakesFewerBytes) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 10'000; ++i) {
    Traffic traffic;
    traffic.elements = 1 + random() % 1'000'000;
    traffic.contributors = 1 + static_cast<uint32_t>(random() % 64);
    traffic.in_union = 1 + random() % traffic.elements;
    traffic.sent = traffic.in_union + random() % (traffic.in_union * (traffic.contributors - 1) + 1);
    ASSERT_GT(BytesOfForms(traffic).sketch, BytesOfForms(traffic).gaps);
  }
}

// One accumulator, round after round, as a shard has it; in some rounds workers choose differently.
TEST(Adaptive, ChangesItsFormWithoutLoss) {
  ClusterOptions options;
  options.codec = "adaptive";
  options.workers = 4;
  options.elements = 70'001;
  Cluster cluster(options);
  const GradientFn gradient = [&](uint32_t worker, uint64_t round, std::vector<float>* out) {
    const double densities[] = {0.01, 1, 0.5, 0.99, 0.01, 0};
    const double density = round % 2 == 0 && worker == 1 ? 0.999 : densities[round % 6];
    DyadicGradient(round, out->size(), density, false)(worker, round, out);
  };
  cluster.Calibrate(gradient);
  const auto accumulator = cluster.codec().NewAccumulator();
  int dense = 0, sparse = 0;
  for (int r = 0; r < 12; ++r) {
    std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
    for (const EncodedFrame& frame : frames) {
      const ParsedFrame parsed = ParseAll(frame);
      const std::vector<wire::SegmentHeader> headers(parsed.segments.begin(), parsed.segments.end());
      EXPECT_TRUE(cluster.codec().CheckComplete(cluster.round(), cluster.plan(), headers).ok());
      (parsed.segments.back().type == wire::SegmentType::kDenseF32 ? dense : sparse) += 1;
    }
    accumulator->Open(cluster.round(), cluster.plan());
    MergeShuffled(frames, cluster.random(), accumulator.get());
    auto update = accumulator->Finish(cluster.Identity(0), 4);
    ASSERT_TRUE(update.ok()) << update.status();
    cluster.Close(std::move(frames), *std::move(update));
    EXPECT_EQ(cluster.LargestLoss(), 0) << "round " << r;
  }
  EXPECT_GE(dense, 8);
  EXPECT_GE(sparse, 8);
}

}  // namespace
}  // namespace gradwire::testing
