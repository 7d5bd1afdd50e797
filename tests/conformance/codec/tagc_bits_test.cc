// How wide the integers of TAGC are where nobody says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "tests/conformance/codec/codec_harness.h"
#include "tests/conformance/codec/list_of_one.h"

namespace gradwire::testing {
namespace {

ClusterOptions OfOneWorker(uint64_t elements) {
  ClusterOptions options;
  options.codec = "tagc:density=0.1";
  options.workers = 1;
  options.elements = elements;
  return options;
}

TEST(TagcBits, AreFiveByDefaultAndHaveRoomForTheSumsOfAllWorkers) {
  // Cells of 8 bits hold the sums of 8 workers, of 16 bits those of 2184.
  for (const uint32_t workers : {1u, 8u, 9u, 2184u, 2185u}) {
    SCOPED_TRACE(workers);
    ClusterOptions options = OfOneWorker(64);
    options.max_workers = workers;
    Cluster cluster(options);
    cluster.Calibrate(GaussianGradient(6, 64));
    for (const int32_t sign : {1, -1}) {
      const auto accumulator = cluster.OpenAccumulator();
      const ListOfOne most(15 * sign), more(16 * sign);
      EXPECT_FALSE(accumulator->Add(more.segment).ok());
      for (uint32_t w = 0; w < workers; ++w) ASSERT_TRUE(accumulator->Add(most.segment).ok()) << w;
      const auto frame = accumulator->Finish(cluster.Identity(0), workers);
      ASSERT_TRUE(frame.ok());
      const auto update = DecodeUpdate(frame->chunks, cluster.job(), cluster.layout(), cluster.plan());
      ASSERT_TRUE(update.ok()) << update.status();
      EXPECT_THAT(update->integers, ::testing::ElementsAre(15 * sign * static_cast<int32_t>(workers)));
    }
  }
}

// A job that was begun when `tagc` by itself had as many bits as 16-bit cells hold.
TEST(TagcBits, OfAPlanThatHadMoreAreClippedForARound) {
  const uint64_t n = 4096;
  const GradientFn gradient = GaussianGradient(3, n);
  ClusterOptions options = OfOneWorker(n);
  options.max_workers = 16;
  Cluster now(options);
  now.Calibrate(gradient);
  options.codec = "tagc:density=0.1,cells=16";
  Cluster before(options);
  before.Calibrate(gradient);
  ASSERT_LT(before.plan().exponents[0], now.plan().exponents[0]);

  std::vector<float> memory(n);
  gradient(0, 0, &memory);
  const std::vector<float> given = memory;
  const std::vector<RunInput> runs = {{nullptr, memory.data(), {}}};
  const auto frame = now.codec().NewEncoder()->Encode(now.Identity(1001), before.plan(), runs);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_GT(frame->integers.size(), n / 20);
  for (size_t i = 0; i < frame->integers.size(); ++i) {
    EXPECT_LE(std::abs(frame->integers[i]), 15);
    const uint32_t p = frame->positions[i];
    EXPECT_EQ(memory[p] + std::ldexp(static_cast<float>(frame->integers[i]), before.plan().exponents[0]), given[p]);
  }
  const auto accumulator = now.OpenAccumulator();
  accumulator->Open(now.round(), before.plan());
  const ParsedFrame parsed = ParseAll(*frame);
  for (const wire::Segment& s : parsed.segments) ASSERT_TRUE(accumulator->Add(s).ok());
  const auto update = accumulator->Finish(now.Identity(0), 1);
  ASSERT_TRUE(update.ok());
  EXPECT_EQ(update->next.exponents, now.plan().exponents);
}

}  // namespace
}  // namespace gradwire::testing
