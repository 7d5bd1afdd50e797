// What only the TAGC codec promises: integer sums, the same of lists and of sketches, deferral instead of estimates,
// sizes near the information bound, and refusal of more than its integers have room for. Of sketches, unless a test
// says otherwise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/plan/ranges.h"
#include "tests/conformance/codec/codec_harness.h"
#include "tests/conformance/codec/list_of_one.h"

namespace gradwire::testing {
namespace {

using ::testing::HasSubstr;

ClusterOptions Options(std::string codec, uint32_t workers, uint64_t elements) {
  ClusterOptions options;
  options.codec = std::move(codec);
  if (options.codec.find("form=") == std::string::npos) options.codec += ",form=sketch";
  options.workers = workers;
  options.elements = elements;
  return options;
}

TEST(TagcCodec, DecodesToTheIntegerSumOfItsFrames) {
  for (const char* codec : {"tagc:density=0.05,cells=8", "tagc:density=0.05,cells=16", "tagc:density=0.05,cells=32"}) {
    for (uint32_t workers : {1u, 2u, 7u, 32u, 64u}) {
      for (bool clustered : {false, true}) {
        if (workers == 64 && std::string(codec).find("cells=8") != std::string::npos) workers = 63;
        SCOPED_TRACE(::testing::Message() << codec << ", " << workers << " workers, clustered " << clustered);
        const uint64_t n = 30'000;
        Cluster cluster(Options(codec, workers, n));
        const GradientFn gradient = DyadicGradient(workers, n, 0.05, clustered);
        cluster.Calibrate(gradient);
        for (int r = 0; r < 2; ++r) {
          const RoundResult result = cluster.Round(gradient);
          std::map<uint32_t, int64_t> sums;
          for (const EncodedFrame& frame : result.frames) {
            for (size_t i = 0; i < frame.positions.size(); ++i) sums[frame.positions[i]] += frame.integers[i];
          }
          for (uint32_t p : result.update.deferred) ASSERT_EQ(sums.erase(p), 1u) << "deferred, but nobody sent it";
          std::erase_if(sums, [](const auto& s) { return s.second == 0; });
          ASSERT_EQ(sums.size(), result.update.positions.size());
          size_t i = 0;
          for (const auto& [position, sum] : sums) {
            ASSERT_EQ(result.update.positions[i], position);
            ASSERT_EQ(result.update.integers[i], sum);
            ++i;
          }
          EXPECT_GT(i, 0u);
        }
      }
    }
  }
}

// fl(residual + gradient) = integer * 2^exponent + residual', to the last bit, for values of every magnitude.
TEST(TagcCodec, ResidualKeepsExactlyWhatWasNotSent) {
  const uint64_t n = 20'000;
  for (const char* codec : {"tagc:density=0.1,cells=8", "tagc:density=0.1,cells=16", "tagc:density=0.1,cells=32"}) {
    Cluster cluster(Options(codec, 2, n));
    const GradientFn gradient = [](uint32_t worker, uint64_t round, std::vector<float>* out) {
      std::mt19937_64 random(worker * 1000 + round);
      std::normal_distribution<float> normal;
      for (uint64_t i = 0; i < n; ++i) {
        (*out)[i] = std::ldexp(normal(random), static_cast<int>(random() % 40) - 36);
        if (i % 97 == 0) (*out)[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(i);
        if (i % 5003 == 0) (*out)[i] = 3e37f;  // far out of range: it may stay, it may not be damaged
      }
    };
    cluster.Calibrate(gradient);
    size_t sent = 0;
    for (int r = 0; r < 3; ++r) {
      const std::vector<float> before = cluster.pending(1);
      std::vector<float> g(n);
      gradient(1, cluster.round(), &g);
      const RoundPlan plan = cluster.plan();
      const RoundResult result = cluster.Round(gradient);
      std::vector<float> after = cluster.pending(1);
      if (!result.update.deferred.empty()) continue;  // its return is tested elsewhere
      std::vector<double> value(n, 0);
      const EncodedFrame& frame = result.frames[1];
      for (size_t i = 0; i < frame.positions.size(); ++i) {
        value[frame.positions[i]] = std::ldexp(frame.integers[i], plan.exponents[frame.positions[i] / 4096]);
      }
      sent += frame.positions.size();
      for (size_t i = 0; i < n; ++i) {
        const float formed = before[i] + g[i];
        ASSERT_EQ(static_cast<double>(formed), value[i] + static_cast<double>(after[i])) << "element " << i;
      }
    }
    EXPECT_GT(sent, 0u) << codec;
  }
}

TEST(TagcCodec, OverloadDefersAndLosesNothing) {
  for (const char* codec : {"tagc:density=0.1,cells=8,slack=0.5", "tagc:density=0.1,cells=32,slack=0.5",
                            "tagc:density=0.1,cells=16,slack=0.7"}) {
    const uint64_t n = 50'000;
    Cluster cluster(Options(codec, 3, n));
    const GradientFn gradient = DyadicGradient(1, n, 0.5, false);
    cluster.Calibrate(gradient);
    uint64_t deferred = 0;
    for (int r = 0; r < 8; ++r) {
      const RoundResult result = cluster.Round(gradient);
      deferred += result.update.deferred.size();
      EXPECT_EQ(result.update.deferred.size(), result.update_frame.stats.deferred);
      ASSERT_EQ(cluster.LargestLoss(), 0) << codec << ", round " << r;
    }
    EXPECT_GT(deferred, 1000u) << codec;
  }
}

// A few elements are sent for some rounds, then five times as many: what the sketch has no room for is listed.
class TagcLists : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr uint64_t kElements = 60'000;

  explicit TagcLists(uint32_t workers = 3) : cluster_(Options(GetParam(), workers, kElements)) {
    cluster_.Calibrate(few_);
    for (int r = 0; r < 12; ++r) cluster_.Round(few_);
  }

  static std::vector<wire::Segment> ListsOf(const ParsedFrame& frame) {
    std::vector<wire::Segment> lists;
    for (const wire::Segment& s : frame.segments) {
      if (s.type == wire::SegmentType::kList && s.bytes != 0) lists.push_back(s);
    }
    return lists;
  }
  static std::vector<wire::SegmentHeader> Headers(const ParsedFrame& frame) {
    return {frame.segments.begin(), frame.segments.end()};
  }

  const GradientFn few_ = DyadicGradient(1, kElements, 0.02, false);
  const GradientFn many_ = DyadicGradient(1, kElements, 0.1, false);
  Cluster cluster_;
};

TEST_P(TagcLists, WhatWouldOverloadTheSketch) {
  const RoundResult before = cluster_.Round(few_);
  const RoundResult result = cluster_.Round(many_);
  size_t listed = 0;
  std::map<uint32_t, int64_t> sums;
  for (const EncodedFrame& frame : result.frames) {
    listed += ListsOf(ParseAll(frame)).size();
    for (size_t i = 0; i < frame.positions.size(); ++i) sums[frame.positions[i]] += frame.integers[i];
  }
  EXPECT_GE(listed, 3u);
  EXPECT_GT(result.update_frame.stats.elements, 3 * before.update_frame.stats.elements);
  EXPECT_LE(result.update.deferred.size(), 4u);
  for (uint32_t p : result.update.deferred) sums.erase(p);
  std::erase_if(sums, [](const auto& s) { return s.second == 0; });
  ASSERT_EQ(sums.size(), result.update.positions.size());
  size_t i = 0;
  for (const auto& [position, sum] : sums) {
    ASSERT_EQ(result.update.positions[i], position);
    ASSERT_EQ(result.update.integers[i++], sum);
  }
  EXPECT_EQ(cluster_.LargestLoss(), 0);
}

TEST_P(TagcLists, CanBeTakenBackAndStayWithinTheirMemory) {
  const std::vector<EncodedFrame> frames = cluster_.EncodeAll(many_);
  auto alone = cluster_.OpenAccumulator();
  MergeShuffled({frames[0]}, cluster_.random(), alone.get());
  auto both = cluster_.OpenAccumulator();
  MergeShuffled({frames[1], frames[0], frames[2]}, cluster_.random(), both.get());
  EXPECT_LE(both->memory_bytes(), cluster_.codec().accumulator_bytes());
  for (size_t w : {2u, 1u}) {
    for (const wire::Segment& s : ParseAll(frames[w]).segments) {
      if (s.type != wire::SegmentType::kLearningRates) both->Remove(s);
    }
  }
  EXPECT_EQ(Joined(both->Finish(cluster_.Identity(0), 1)->chunks),
            Joined(alone->Finish(cluster_.Identity(0), 1)->chunks));
}

TEST_P(TagcLists, AreRefusedWhereTheyAreWrong) {
  const std::vector<EncodedFrame> frames = cluster_.EncodeAll(many_);
  const ParsedFrame parsed = ParseAll(frames[0]);
  const std::vector<wire::Segment> lists = ListsOf(parsed);
  ASSERT_FALSE(lists.empty());
  auto accumulator = cluster_.OpenAccumulator();
  const auto refuses = [&](wire::Segment s, std::vector<uint8_t> payload) {
    s.data = payload.data();
    s.bytes = static_cast<uint32_t>(payload.size());
    return accumulator->Add(s).code() == absl::StatusCode::kInvalidArgument;
  };
  const std::vector<uint8_t> good(lists[0].data, lists[0].data + lists[0].bytes);
  std::vector<uint8_t> bad = good;
  bad.pop_back();  // the end of the integers
  EXPECT_TRUE(refuses(lists[0], bad));
  bad = good;
  bad[0] ^= 0x7F;  // of the bytes of the index
  EXPECT_TRUE(refuses(lists[0], bad));
  EXPECT_TRUE(refuses(lists[0], {1, 0}));
  EXPECT_TRUE(refuses(lists[0], {}));  // there are positions, says its coding
  // Element 5 alone, with the largest integer of a worker and with one more.
  const std::string codec = GetParam();
  int32_t limit = IntegerLimit(std::stoi(codec.substr(codec.rfind('=') + 1)), cluster_.workers());
  if (codec.find("bits=2") != std::string::npos) limit = 1;
  for (const int32_t integer : {limit, limit + 1, -limit, -limit - 1}) {
    const ListOfOne one(integer);
    const bool added = accumulator->Add(one.segment).ok();
    EXPECT_EQ(added, integer <= limit && integer >= -limit) << integer;
    if (added) accumulator->Remove(one.segment);
  }
  wire::Segment outside = lists[0];
  outside.begin = kElements - 1;
  EXPECT_TRUE(refuses(outside, good));
  EXPECT_TRUE(cluster_.codec().CheckComplete(cluster_.round(), cluster_.plan(), Headers(parsed)).ok());
  std::vector<wire::SegmentHeader> headers = Headers(parsed);
  headers.pop_back();  // the last elements
  EXPECT_FALSE(cluster_.codec().CheckComplete(cluster_.round(), cluster_.plan(), headers).ok());
  headers = Headers(parsed);
  headers.push_back(headers.back());
  EXPECT_FALSE(cluster_.codec().CheckComplete(cluster_.round(), cluster_.plan(), headers).ok());
  EXPECT_EQ(accumulator->Finish(cluster_.Identity(0), 1)->stats.elements, 0u);  // nothing of it was merged
}

// All of a large bucket in one segment takes a byte on the wire and a word for each element in memory.
TEST(TagcSegments, OfPositionsCoverNoMoreThanABlock) {
  constexpr uint32_t kBlock = 1 << 16;  // at this density
  for (const char* codec : {"tagc:density=0.05", "tagc:density=0.05,form=sketch"}) {
    ClusterOptions options;
    options.codec = codec;
    options.workers = 1;
    options.elements = 3 * kBlock;
    Cluster cluster(options);
    cluster.Calibrate(GaussianGradient(6, options.elements));
    const auto accumulator = cluster.OpenAccumulator();
    wire::Segment none;  // of the elements that it covers
    none.type = options.codec.ends_with("sketch") ? wire::SegmentType::kIndex : wire::SegmentType::kList;
    none.begin = kBlock;
    none.count = kBlock;
    EXPECT_TRUE(accumulator->Add(none).ok()) << codec;
    none.count = kBlock + 1;
    EXPECT_EQ(accumulator->Add(none).code(), absl::StatusCode::kInvalidArgument) << codec;
  }
}

TEST_P(TagcLists, FillNoMoreMemoryThanWasAnnounced) {
  const std::vector<EncodedFrame> frames = cluster_.EncodeAll(many_);
  const ParsedFrame parsed = ParseAll(frames[0]);
  const std::vector<wire::Segment> lists = ListsOf(parsed);
  ASSERT_FALSE(lists.empty());
  auto accumulator = cluster_.OpenAccumulator();
  wire::Segment one = lists[0];
  absl::Status status;
  for (int i = 0; i < 100'000 && status.ok(); ++i) {
    status = accumulator->Add(one);
    EXPECT_LE(accumulator->memory_bytes(), cluster_.codec().accumulator_bytes());
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Cells, TagcLists,
                         ::testing::Values("tagc:density=0.1,cells=8", "tagc:density=0.1,cells=16",
                                           "tagc:density=0.1,cells=32", "tagc:density=0.1,bits=2,cells=16"),
                         [](const auto& info) {
                           const std::string codec = info.param;
                           const bool few = codec.find("bits=") != std::string::npos;
                           return (few ? "TwoIn" : "Bits") + codec.substr(codec.rfind('=') + 1);
                         });

TEST(TagcCodec, HardlyDefersOnceItsGeometryHasSettled) {
  const uint64_t n = 300'000;
  Cluster cluster(Options("tagc:density=0.01,cells=16", 4, n));
  const GradientFn gradient = GaussianGradient(3, n);
  cluster.Calibrate(gradient);
  uint64_t deferred = 0, elements = 0;
  for (int r = 0; r < 20; ++r) {
    const RoundResult result = cluster.Round(gradient);
    deferred += result.update_frame.stats.deferred;
    elements += result.update_frame.stats.elements;
  }
  EXPECT_GT(elements, 100'000u);
  EXPECT_LE(static_cast<double>(deferred), 2e-4 * static_cast<double>(elements));
}

TEST(TagcCodec, ARecoveredWorkerDoesNotOverloadTheNextRound) {
  const uint64_t n = 200'000;
  Cluster cluster(Options("tagc:density=0.02,cells=16", 4, n));
  bool all_there = true;
  const GradientFn base = GaussianGradient(3, n);
  const GradientFn gradient = [&](uint32_t worker, uint64_t round, std::vector<float>* out) {
    if (worker == 3 && !all_there) {
      std::fill(out->begin(), out->end(), 0.0f);
      return;
    }
    base(worker, round, out);
  };
  cluster.Calibrate(gradient);
  for (int r = 0; r < 6; ++r) cluster.Round(gradient);
  std::fill(cluster.pending(3).begin(), cluster.pending(3).end(), 0.0f);
  all_there = false;
  cluster.Round(gradient);
  all_there = true;
  const RoundResult back = cluster.Round(gradient);
  EXPECT_LE(static_cast<double>(back.update_frame.stats.deferred),
            1e-3 * static_cast<double>(back.update_frame.stats.elements));
}

// What is sent is the same in either form, and so is what comes of it: of lists, of sketches, of both in one round.
TEST(TagcForms, GiveTheSameUpdateFrames) {
  const uint64_t n = 30'000;
  for (const char* codec : {"tagc:density=0.02,cells=8", "tagc:density=0.02,cells=16", "tagc:density=0.02,cells=32",
                            "tagc:density=0.02,bits=2"}) {
    for (uint32_t workers : {1u, 2u, 7u, 63u}) {
      SCOPED_TRACE(::testing::Message() << codec << ", " << workers << " workers");
      Cluster lists(Options(absl::StrCat(codec, ",form=auto"), workers, n));
      Cluster sketches(Options(absl::StrCat(codec, ",form=sketch"), workers, n));
      const GradientFn gradient = DyadicGradient(workers, n, 0.02, false);
      lists.Calibrate(gradient);
      sketches.Calibrate(gradient);
      for (int r = 0; r < 3; ++r) {
        ASSERT_EQ(lists.plan(), sketches.plan());
        std::vector<EncodedFrame> listed = lists.EncodeAll(gradient);
        std::vector<EncodedFrame> sketched = sketches.EncodeAll(gradient);
        std::vector<EncodedFrame> mixed;
        for (uint32_t w = 0; w < workers; ++w) {
          ASSERT_EQ(listed[w].positions, sketched[w].positions);
          ASSERT_LT(listed[w].bytes, sketched[w].bytes);
          mixed.push_back(w % 2 == 0 ? listed[w] : sketched[w]);
        }
        const auto finish = [&](const Cluster& cluster, const std::vector<EncodedFrame>& frames) {
          auto accumulator = cluster.OpenAccumulator();
          MergeShuffled(frames, lists.random(), accumulator.get());
          return *accumulator->Finish(cluster.Identity(0), workers);
        };
        UpdateFrame of_lists = finish(lists, listed);
        UpdateFrame of_sketches = finish(sketches, sketched);
        ASSERT_EQ(of_sketches.stats.deferred, 0u) << "choose another seed";
        EXPECT_EQ(Joined(of_lists.chunks), Joined(of_sketches.chunks));
        EXPECT_EQ(Joined(of_lists.chunks), Joined(finish(sketches, mixed).chunks));
        EXPECT_EQ(Joined(of_lists.chunks), Joined(finish(sketches, listed).chunks));
        EXPECT_GT(lists.Close(std::move(listed), std::move(of_lists)).update.positions.size(), n / 100);
        sketches.Close(std::move(sketched), std::move(of_sketches));
      }
      EXPECT_EQ(lists.LargestLoss(), 0);
    }
  }
}

// Where the largest element of any worker has passed a power of 2 in some runs and not in others, a list has integers
// of two ranges, which takes more bits than either.
TEST(TagcForms, ListsDoNotGrowWithTheWorkersAndNoneOfThemIsDeferred) {
  const uint64_t n = 1u << 18;
  for (const auto& [codec, most] : {std::pair("tagc:density=0.01,cells=16,form=list", 1.05),
                                    {"tagc:density=0.01,bits=2,form=auto", 1.05},
                                    {"tagc:density=0.01,form=auto", 1.1}}) {
    SCOPED_TRACE(codec);
    uint64_t alone = 0;
    for (uint32_t workers : {1u, 4u, 16u, 64u}) {
      Cluster cluster(Options(codec, workers, n));
      const GradientFn gradient = GaussianGradient(5, n);
      cluster.Calibrate(gradient);
      RoundResult result;
      for (int r = 0; r < 3; ++r) {
        result = cluster.Round(gradient);
        EXPECT_EQ(result.update_frame.stats.deferred, 0u);
      }
      if (workers == 1) alone = result.frames[0].bytes;
      EXPECT_LE(static_cast<double>(result.frames[0].bytes), most * static_cast<double>(alone)) << workers;
    }
  }
}

TEST(TagcForms, AShardOfListsTakesNoSketches) {
  const uint64_t n = 10'000;
  Cluster sketches(Options("tagc:density=0.1,form=sketch", 2, n));
  const GradientFn gradient = DyadicGradient(1, n, 0.1, false);
  sketches.Calibrate(gradient);
  const ParsedFrame sketched = ParseAll(sketches.EncodeAll(gradient)[0]);
  for (const char* form : {"auto", "list"}) {
    Cluster lists(Options(absl::StrCat("tagc:density=0.1,form=", form), 2, n));
    lists.Calibrate(gradient);
    EXPECT_FALSE(lists.codec().defers());
    EXPECT_LT(lists.codec().accumulator_bytes(), sketches.codec().accumulator_bytes());
    auto accumulator = lists.OpenAccumulator();
    int refused = 0;
    for (const wire::Segment& s : sketched.segments) {
      if (s.type != wire::SegmentType::kIndex && s.type != wire::SegmentType::kCells) continue;
      const absl::Status status = accumulator->Add(s);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr("frames of tagc:density=0.1,cells=auto"));
      ++refused;
    }
    EXPECT_GE(refused, 2);
  }
}

// Entropy of the index plus the bits of the values, for k of n elements sent.
double InformationBytes(double n, double k, int value_bits) {
  const double p = k / n;
  return (n * (-p * std::log2(p) - (1 - p) * std::log2(1 - p)) + k * value_bits) / 8;
}

// Index and integers as they are coded, with all headers.
TEST(TagcForms, ListsAreWithinATenthOfTheInformationBound) {
  for (const char* bits : {"auto", "2"}) {
    for (double density : {0.0005, 0.001, 0.01, 0.1}) {
      const uint64_t n = density < 0.005 ? 1u << 22 : 1u << 20;
      Cluster cluster(Options(absl::StrCat("tagc:density=", density, ",form=auto,bits=", bits), 1, n));
      const GradientFn gradient = GaussianGradient(17, n);
      cluster.Calibrate(gradient);
      RoundResult result;
      for (int r = 0; r < 4; ++r) result = cluster.Round(gradient);
      double sent = 0, value_bits = 0;
      for (const wire::Segment& s : ParseAll(result.frames[0]).segments) {
        if (s.type != wire::SegmentType::kList || s.bytes == 0) continue;
        uint64_t index_bytes = 0;
        std::span<const uint8_t> payload = s.payload();
        ASSERT_TRUE(TakeNumber(&payload, &index_bytes));
        std::vector<uint32_t> positions;
        ASSERT_EQ(DecodeIndex(static_cast<IndexCoding>(s.param & 7), payload.first(index_bytes),
                              static_cast<uint32_t>(s.begin), s.count, &positions),
                  absl::OkStatus());
        sent += static_cast<double>(positions.size());
        value_bits += 8 * static_cast<double>(payload.size() - index_bytes);
      }
      ASSERT_GT(sent, 0.2 * density * static_cast<double>(n));
      const double bound = InformationBytes(static_cast<double>(n), sent, 0) + value_bits / 8;
      EXPECT_LE(static_cast<double>(result.frames[0].bytes), 1.1 * bound) << "bits=" << bits << ", density " << density;
    }
  }
}

TEST(TagcForms, SumsOfSignsComeBackInAThirdOfFloat32) {
  for (uint32_t workers : {2u, 8u, 16u}) {
    const uint64_t n = 1u << 18;
    Cluster cluster(Options("tagc:density=0.01,form=auto,bits=2", workers, n));
    const GradientFn gradient = GaussianGradient(5, n);
    cluster.Calibrate(gradient);
    RoundResult result;
    for (int r = 0; r < 3; ++r) result = cluster.Round(gradient);
    const double positions = static_cast<double>(result.update.positions.size());
    ASSERT_GT(positions, 0.005 * static_cast<double>(n));
    EXPECT_LE(static_cast<double>(TotalSize(result.update_frame.chunks)), 4 * positions / 3)
        << "of float32's values alone, " << workers << " workers";
  }
}

TEST(TagcCodec, FramesAreWithin35PercentOfTheInformationBound) {
  for (double density : {0.001, 0.01, 0.1}) {
    for (int bits : {8, 16, 32}) {
      const uint64_t n = density < 0.005 ? 1u << 22 : 1u << 20;
      Cluster cluster(Options("tagc:density=" + std::to_string(density) + ",cells=" + std::to_string(bits), 1, n));
      const GradientFn gradient = GaussianGradient(17, n);
      cluster.Calibrate(gradient);
      RoundResult result;
      for (int r = 0; r < 4; ++r) result = cluster.Round(gradient);
      const double sent = static_cast<double>(result.frames[0].positions.size());
      const double ratio =
          static_cast<double>(result.frames[0].bytes) / InformationBytes(static_cast<double>(n), sent, bits);
      std::printf("density %g, cells %d: %.0f sent, %d bytes, %.3f of the bound, update %d bytes, %d deferred\n",
                  density, bits, sent, static_cast<int>(result.frames[0].bytes), ratio,
                  static_cast<int>(TotalSize(result.update_frame.chunks)),
                  static_cast<int>(result.update.deferred.size()));
      EXPECT_LE(ratio, 1.35) << "density " << density << ", " << bits << "-bit cells";
      EXPECT_GE(ratio, 1.0);
      EXPECT_NEAR(sent, density * static_cast<double>(n), 0.25 * density * static_cast<double>(n));
    }
  }
}

TEST(TagcCodec, RefusesMoreContributionsThanItsIntegersHold) {
  for (uint32_t max_workers : {1u, 2u, 3u}) {
    ClusterOptions options = Options("tagc:density=0.1,cells=8", max_workers, 5000);
    Cluster cluster(options);
    const GradientFn gradient = GaussianGradient(1, 5000);
    cluster.Calibrate(gradient);
    const auto frames = cluster.EncodeAll(gradient);
    auto accumulator = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), accumulator.get());
    auto clean = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), clean.get());
    const std::vector<uint8_t> expected = Joined(clean->Finish(cluster.Identity(0), max_workers)->chunks);
    int refused = 0;
    const ParsedFrame once_more = ParseAll(frames[0]);
    for (const wire::Segment& s : once_more.segments) {
      if (s.type == wire::SegmentType::kLearningRates) continue;
      EXPECT_EQ(accumulator->Add(s).code(), absl::StatusCode::kInvalidArgument);
      ++refused;
    }
    EXPECT_GE(refused, 3);
    EXPECT_EQ(Joined(accumulator->Finish(cluster.Identity(0), max_workers)->chunks), expected);
  }
}

TEST(TagcCodec, RefusesAPlanThatDoesNotFit) {
  Cluster cluster(Options("tagc:density=0.1,cells=8", 1, 5000));
  const GradientFn gradient = GaussianGradient(1, 5000);
  cluster.Calibrate(gradient);
  const RoundPlan good = cluster.plan();
  std::vector<float> memory(5000, 1.0f);
  const std::vector<RunInput> runs = {{nullptr, memory.data(), {}}, {nullptr, memory.data() + 4096, {}}};
  const auto refuses = [&](RoundPlan plan) {
    auto accumulator = cluster.codec().NewAccumulator();
    accumulator->Open(cluster.round(), plan);
    const bool encoder = !cluster.codec().NewEncoder()->Encode(cluster.Identity(1), plan, runs).ok();
    return encoder && !accumulator->Finish(cluster.Identity(0), 1).ok();
  };
  EXPECT_FALSE(refuses(good));
  RoundPlan bad = good;
  bad.exponents[0] = 100;
  EXPECT_TRUE(refuses(bad));
  bad = good;
  bad.exponents.pop_back();
  EXPECT_TRUE(refuses(bad));
  bad = good;
  bad.exponents[1] = kUncalibrated;
  EXPECT_TRUE(refuses(bad));
  for (const auto& [groups, cells] : {std::pair{1u, 0u}, {1u, 100u}, {0xFFFFFFFFu, 3u}, {1u, 0xFFFFFFFFu}}) {
    bad = good;
    bad.sketch_groups = groups;
    bad.cells_per_group = cells;
    EXPECT_TRUE(refuses(bad)) << groups << " groups of " << cells;
  }
}

// Nobody contributed to round 0: the next round still has no plan, and must not lose what it is given.
TEST(TagcCodec, CalibratesAgainWhenRoundZeroHadNoContributors) {
  Cluster cluster(Options("tagc:density=0.1,cells=8", 2, 5000));
  auto accumulator = cluster.OpenAccumulator();
  cluster.Close({}, *accumulator->Finish(cluster.Identity(0), 0));
  const GradientFn gradient = DyadicGradient(1, 5000, 0.5, false);
  const RoundResult first = cluster.Round(gradient);
  EXPECT_EQ(first.update.body, Update::Body::kEmpty);
  EXPECT_EQ(cluster.LargestLoss(), 0);
  const RoundResult second = cluster.Round(gradient);
  EXPECT_EQ(second.update.body, Update::Body::kSparse);
  EXPECT_GT(second.update.positions.size(), 400u);
  EXPECT_EQ(cluster.LargestLoss(), 0);
}

TEST(TagcCodec, WarmUpDensityFollowsItsSchedule) {
  const uint64_t n = 200'000;
  Cluster cluster(Options("tagc:density=0.01,cells=16,warmup_rounds=4,warmup_density=0.16", 2, n));
  const GradientFn gradient = GaussianGradient(1, n);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 6; ++r) {
    const double wanted = cluster.codec().Density(cluster.round()) * static_cast<double>(n);
    const RoundResult result = cluster.Round(gradient);
    EXPECT_NEAR(static_cast<double>(result.frames[0].positions.size()), wanted, 0.1 * wanted) << "round " << r + 1;
    EXPECT_LE(static_cast<double>(result.update_frame.stats.deferred), 0.001 * wanted) << "round " << r + 1;
  }
}

TEST(TagcCodec, RefusesMoreWorkersThanACellHasRoomFor) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.set_codec("tagc:cells=8");
  spec.set_max_workers(128);
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  tensor->add_shape(10);
  const Job job = *Job::Make(spec);
  const Layout layout = *Layout::Make(job, 1);
  auto backend = *kernels::MakeBackend("cpu");
  const auto codec = MakeCodec({&job, &layout.at(0, 0), backend.get()});
  ASSERT_FALSE(codec.ok());
  EXPECT_THAT(std::string(codec.status().message()), HasSubstr("cells=16"));
}

}  // namespace
}  // namespace gradwire::testing
