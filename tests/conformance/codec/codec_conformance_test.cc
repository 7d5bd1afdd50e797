// What every codec promises (common/codec/codec.h), one body of tests over all of them: merged and decoded equals the
// exact sum, whatever the order; nothing is lost; what was added can be taken out; bad input is refused unharmed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "common/codec/frame_assembler.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

using ::testing::TestWithParam;

// Codec and backend.
class CodecConformance : public TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const std::string& codec() const { return std::get<0>(GetParam()); }
  ClusterOptions Options(uint32_t workers, uint64_t elements, uint64_t seed = 1) const {
    ClusterOptions options;
    options.codec = codec();
    options.backend = std::get<1>(GetParam());
    options.workers = workers;
    // 8-bit cells have room for few workers; a job of more would not be made with them.
    if (codec().find("cells=8") != std::string::npos) options.workers = std::min(workers, 60u);
    options.elements = elements;
    options.seed = seed;
    return options;
  }
  // Means divide by the number of workers; by a power of two they are exact, and then so is the sum they stand for.
  static bool ExactMeans(uint32_t workers) { return (workers & (workers - 1)) == 0; }
};

// The sum over the workers of what each frame took out of its residual, compared with what the update stands for.
void ExpectRoundIsExact(Cluster& cluster, const GradientFn& gradient) {
  std::vector<std::vector<float>> before;
  for (uint32_t w = 0; w < cluster.workers(); ++w) before.push_back(cluster.pending(w));
  const uint64_t round = cluster.round();
  const RoundResult result = cluster.Round(gradient);
  const size_t n = cluster.layout().elements;
  std::vector<double> taken(n, 0);
  for (uint32_t w = 0; w < cluster.workers(); ++w) {
    std::vector<float> g(n);
    gradient(w, round, &g);
    for (size_t i = 0; i < n; ++i) {
      const float formed = before[w][i] + g[i];
      taken[i] += static_cast<double>(formed) - static_cast<double>(cluster.pending(w)[i]);
    }
  }
  for (size_t i = 0; i < n; ++i) ASSERT_EQ(result.applied[i], taken[i]) << "element " << i << ", round " << round;
}

TEST_P(CodecConformance, SumsAreExactForEveryLength) {
  for (uint64_t n : {0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4097, 70'001}) {
    for (bool clustered : {false, true}) {
      SCOPED_TRACE(::testing::Message() << n << " elements, clustered " << clustered);
      Cluster cluster(Options(4, n, n + 1));
      const GradientFn gradient = DyadicGradient(7, n, 0.05, clustered);
      cluster.Calibrate(gradient);
      for (int r = 0; r < 3; ++r) ExpectRoundIsExact(cluster, gradient);
      EXPECT_EQ(cluster.LargestLoss(), 0);
    }
  }
}

TEST_P(CodecConformance, SumsAreExactForEveryNumberOfWorkers) {
  for (uint32_t workers : {1, 2, 3, 5, 8, 16, 33, 64}) {
    SCOPED_TRACE(::testing::Message() << workers << " workers");
    const uint64_t n = 6000;
    Cluster cluster(Options(workers, n, workers));
    const GradientFn gradient = DyadicGradient(11, n, 0.1, false);
    cluster.Calibrate(gradient);
    for (int r = 0; r < 2; ++r) {
      if (ExactMeans(cluster.workers()) || cluster.codec().sparse()) {
        ExpectRoundIsExact(cluster, gradient);
      } else {
        cluster.Round(gradient);
      }
    }
    EXPECT_LE(cluster.LargestLoss(), ExactMeans(cluster.workers()) ? 0 : 1e-5);
  }
}

TEST_P(CodecConformance, SumsAreExactForAMillionElements) {
  const uint64_t n = 1'000'007;
  Cluster cluster(Options(2, n));
  const GradientFn gradient = DyadicGradient(3, n, 0.02, false);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 2; ++r) ExpectRoundIsExact(cluster, gradient);
  EXPECT_EQ(cluster.LargestLoss(), 0);
}

TEST_P(CodecConformance, NothingIsLostOverManyRounds) {
  const uint64_t n = 20'000;
  Cluster cluster(Options(4, n));
  const GradientFn gradient = DyadicGradient(5, n, 0.3, false);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 12; ++r) {
    cluster.Round(gradient);
    ASSERT_EQ(cluster.LargestLoss(), 0) << "after round " << r;
  }
}

TEST_P(CodecConformance, FinishDoesNotDependOnTheOrderOfArrival) {
  Cluster cluster(Options(5, 9000));
  const GradientFn gradient = GaussianGradient(2, 9000);
  cluster.Calibrate(gradient);
  const std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
  std::vector<uint8_t> first;
  for (int order = 0; order < 4; ++order) {
    auto accumulator = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), accumulator.get());
    auto update = accumulator->Finish(cluster.Identity(0), 5);
    ASSERT_TRUE(update.ok()) << update.status();
    if (order == 0) first = Joined(update->chunks);
    EXPECT_EQ(Joined(update->chunks), first);
  }
}

TEST_P(CodecConformance, RemoveRestoresTheAccumulator) {
  Cluster cluster(Options(4, 9000));
  const GradientFn base = GaussianGradient(4, 9000);
  // The worker that is taken out has by far the largest values: its ranges must go too.
  const GradientFn gradient = [&base](uint32_t worker, uint64_t round, std::vector<float>* out) {
    base(worker, round, out);
    if (worker != 3) return;
    for (float& x : *out) x *= 64;
  };
  for (int r = 0; r < 2; ++r) {  // the calibration round too
    const std::vector<EncodedFrame> all = cluster.EncodeAll(gradient);
    const std::vector<EncodedFrame> kept(all.begin(), all.end() - 1);
    const ParsedFrame taken_out = ParseAll(all.back());
    auto clean = cluster.OpenAccumulator();
    MergeShuffled(kept, cluster.random(), clean.get());
    auto dirty = cluster.OpenAccumulator();
    MergeShuffled(all, cluster.random(), dirty.get());
    const auto with_all = dirty->Finish(cluster.Identity(0), 3);
    for (const wire::Segment& s : taken_out.segments) {
      if (s.type != wire::SegmentType::kLearningRates) dirty->Remove(s);
    }
    const auto expected = clean->Finish(cluster.Identity(0), 3);
    const auto restored = dirty->Finish(cluster.Identity(0), 3);
    ASSERT_TRUE(expected.ok() && restored.ok() && with_all.ok());
    EXPECT_EQ(Joined(restored->chunks), Joined(expected->chunks));
    if (r == 1) {
      EXPECT_NE(Joined(with_all->chunks), Joined(expected->chunks));
    }
    auto whole = cluster.OpenAccumulator();
    MergeShuffled(all, cluster.random(), whole.get());
    auto update = whole->Finish(cluster.Identity(0), 4);
    ASSERT_TRUE(update.ok());
    cluster.Close(all, *std::move(update));
  }
}

// Frames arrive chunk by chunk, mixed with each other, as on a server; one of them, the round's first or a later one,
// is abandoned on the way, or begins twice.
TEST_P(CodecConformance, AnAbandonedFrameLeavesNoTrace) {
  constexpr uint32_t kWorkers = 3;
  constexpr uint64_t kElements = 150'001;
  Cluster cluster(Options(kWorkers, kElements));
  const GradientFn gradient = GaussianGradient(5, kElements);
  for (int r = 0; r < 2; ++r) {  // the calibration round too
    const std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
    for (int attempt = 0; attempt < 12; ++attempt) {
      const uint32_t victim = static_cast<uint32_t>(attempt) % kWorkers;
      SCOPED_TRACE(::testing::Message() << "round " << r << ", attempt " << attempt << ", victim " << victim);
      std::vector<EncodedFrame> kept;
      for (uint32_t w = 0; w < kWorkers; ++w)
        if (w != victim) kept.push_back(frames[w]);
      auto clean = cluster.OpenAccumulator();
      MergeShuffled(kept, cluster.random(), clean.get());

      auto accumulator = cluster.OpenAccumulator();
      const auto assembler = [&] {
        return std::make_unique<FrameAssembler>(&cluster.codec(), &cluster.layout(), accumulator.get(), &cluster.plan(),
                                                cluster.round(), uint64_t{1} << 30);
      };
      std::vector<std::unique_ptr<FrameAssembler>> assemblers;
      for (uint32_t w = 0; w < kWorkers; ++w) assemblers.push_back(assembler());
      std::vector<size_t> next(kWorkers, 0);
      const auto add = [&](uint32_t w) {
        const Bytes& bytes = frames[w].chunks[next[w]++];
        const auto chunk = wire::ParseChunk(bytes);
        ASSERT_TRUE(chunk.ok());
        ASSERT_TRUE(assemblers[w]->Add(*chunk, {&bytes, 1}).ok());
        if (!assemblers[w]->complete()) return;
        if (w != victim) assemblers[w]->Commit();
      };
      // The victim's frame goes after so many of its chunks; all of them, once it was complete.
      const size_t last = 1 + cluster.random()() % frames[victim].chunks.size();
      for (bool more = true, again = attempt >= 6; more;) {
        const uint32_t w = static_cast<uint32_t>(cluster.random()() % kWorkers);
        if (assemblers[w] != nullptr && next[w] < frames[w].chunks.size()) add(w);
        if (HasFatalFailure()) return;
        if (w == victim && assemblers[w] != nullptr && next[w] == last) {
          assemblers[w] = again ? assembler() : nullptr;  // what was there is destroyed after the new one began
          EXPECT_FALSE(again && assemblers[w]->spoiled());
          next[w] = 0;
          again = false;
        }
        more = assemblers[victim] != nullptr;
        for (uint32_t v = 0; v < kWorkers; ++v) more = more || (v != victim && next[v] < frames[v].chunks.size());
      }
      const auto expected = clean->Finish(cluster.Identity(0), kWorkers - 1);
      const auto actual = accumulator->Finish(cluster.Identity(0), kWorkers - 1);
      ASSERT_TRUE(expected.ok() && actual.ok());
      EXPECT_TRUE(Joined(actual->chunks) == Joined(expected->chunks));
    }
    auto whole = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), whole.get());
    auto update = whole->Finish(cluster.Identity(0), kWorkers);
    ASSERT_TRUE(update.ok());
    cluster.Close(frames, *std::move(update));
  }
}

TEST_P(CodecConformance, ReturnGivesBackEveryBit) {
  Cluster cluster(Options(2, 9000));
  if (!cluster.codec().uses_residual()) GTEST_SKIP() << "a codec without residual has nothing to return";
  const GradientFn gradient = GaussianGradient(6, 9000);
  cluster.Calibrate(gradient);
  cluster.Round(gradient);
  const std::vector<float> before = cluster.pending(0);
  std::vector<float> g(9000);
  gradient(0, cluster.round(), &g);
  const auto frames = cluster.EncodeAll(gradient);
  EXPECT_NE(cluster.pending(0), before);
  std::vector<float*> runs;
  for (size_t i = 0; i < cluster.layout().runs.size(); ++i) {
    runs.push_back(cluster.pending(0).data() + cluster.layout().run_begin[i]);
  }
  ASSERT_TRUE(cluster.codec().Return(frames[0], nullptr, runs).ok());
  for (size_t i = 0; i < g.size(); ++i) ASSERT_EQ(cluster.pending(0)[i], before[i] + g[i]) << "element " << i;
}

TEST_P(CodecConformance, CheckCompleteRefusesWhatIsNotAWholeFrame) {
  Cluster cluster(Options(1, 200'000));
  const GradientFn gradient = GaussianGradient(8, 200'000);
  for (int r = 0; r < 2; ++r) {
    auto frames = cluster.EncodeAll(gradient);
    const ParsedFrame parsed = ParseAll(frames[0]);
    const std::vector<wire::SegmentHeader> whole(parsed.segments.begin(), parsed.segments.end());
    const auto check = [&](const std::vector<wire::SegmentHeader>& s) {
      return cluster.codec().CheckComplete(cluster.round(), cluster.plan(), s).ok();
    };
    EXPECT_TRUE(check(whole));
    EXPECT_FALSE(check({}));
    for (size_t i = 0; i < whole.size(); ++i) {
      auto missing = whole;
      missing.erase(missing.begin() + static_cast<ptrdiff_t>(i));
      EXPECT_FALSE(check(missing)) << "without segment " << i;
      auto twice = whole;
      twice.insert(twice.begin() + static_cast<ptrdiff_t>(i), whole[i]);
      EXPECT_FALSE(check(twice)) << "segment " << i << " twice";
      if (i > 0) {
        auto swapped = whole;
        std::swap(swapped[i], swapped[i - 1]);
        EXPECT_FALSE(check(swapped)) << "segments " << i - 1 << " and " << i << " swapped";
      }
    }
    auto accumulator = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), accumulator.get());
    cluster.Close(std::move(frames), *accumulator->Finish(cluster.Identity(0), 1));
  }
}

TEST_P(CodecConformance, BadSegmentsAreRefusedAndLeaveNoTrace) {
  Cluster cluster(Options(2, 40'000));
  const GradientFn gradient = GaussianGradient(9, 40'000);
  cluster.Calibrate(gradient);
  const auto frames = cluster.EncodeAll(gradient);
  auto clean = cluster.OpenAccumulator();
  MergeShuffled(frames, cluster.random(), clean.get());
  const std::vector<uint8_t> expected = Joined(clean->Finish(cluster.Identity(0), 2)->chunks);

  // One that holds the frames already, and one that gets them afterwards.
  auto accumulator = cluster.OpenAccumulator();
  auto fresh = cluster.OpenAccumulator();
  MergeShuffled(frames, cluster.random(), accumulator.get());
  int refused = 0;
  const ParsedFrame parsed = ParseAll(frames[0]);
  for (const wire::Segment& s : parsed.segments) {
    if (s.type == wire::SegmentType::kLearningRates) continue;
    for (int attempt = 0; attempt < 400; ++attempt) {
      // A private copy of exact size, so that a sanitizer sees every read past it.
      std::vector<uint8_t> payload(s.data, s.data + s.bytes);
      wire::Segment bad = s;
      switch (cluster.random()() % 6) {
        case 0:
          bad.type = static_cast<wire::SegmentType>(1 + cluster.random()() % 12);
          break;
        case 1:
          bad.param = static_cast<uint8_t>(cluster.random()());
          break;
        case 2:
          bad.begin = cluster.random()() >> (cluster.random()() % 64);
          break;
        case 3:
          bad.count = static_cast<uint32_t>(cluster.random()() >> (32 + cluster.random()() % 32));
          break;
        case 4:
          payload.resize(cluster.random()() % (payload.size() + 9));
          break;
        default:
          for (int k = 0; k < 4 && !payload.empty(); ++k) {
            payload[cluster.random()() % payload.size()] = static_cast<uint8_t>(cluster.random()());
          }
      }
      bad.bytes = static_cast<uint32_t>(payload.size());
      bad.data = payload.data();
      if (bad.type == wire::SegmentType::kLearningRates) continue;
      for (Accumulator* each : {accumulator.get(), fresh.get()}) {
        if (each->Add(bad).ok()) {
          each->Remove(bad);  // still a segment of this codec: it must come out again
        } else {
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(refused, 200);
  MergeShuffled(frames, cluster.random(), fresh.get());
  for (Accumulator* each : {accumulator.get(), fresh.get()}) {
    const auto update = each->Finish(cluster.Identity(0), 2);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(Joined(update->chunks), expected);
  }
}

TEST_P(CodecConformance, ARoundWithoutContributorsKeepsThePlan) {
  Cluster cluster(Options(2, 5000));
  const GradientFn gradient = GaussianGradient(10, 5000);
  cluster.Calibrate(gradient);
  const RoundPlan plan = cluster.plan();
  auto accumulator = cluster.OpenAccumulator();
  auto update = accumulator->Finish(cluster.Identity(0), 0);
  ASSERT_TRUE(update.ok());
  const auto decoded = DecodeUpdate(update->chunks, cluster.job(), cluster.layout(), plan);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->body, Update::Body::kEmpty);
  EXPECT_EQ(decoded->contributors, 0u);
  EXPECT_EQ(decoded->next, plan);
  EXPECT_EQ(update->next, plan);
}

TEST_P(CodecConformance, TheUpdateFrameCarriesTheNextPlan) {
  Cluster cluster(Options(2, 5000));
  const GradientFn gradient = GaussianGradient(12, 5000);
  for (int r = 0; r < 3; ++r) {
    const RoundResult result = cluster.Round(gradient);
    EXPECT_EQ(result.update.next, result.update_frame.next);
    ASSERT_EQ(result.update.learning_rates.size(), 1u);
    EXPECT_EQ(result.update.learning_rates[0], 0.25f);
    if (r == 0) {
      EXPECT_EQ(result.update.body, Update::Body::kEmpty);
    }
  }
}

TEST_P(CodecConformance, MemoryStaysWithinItsBound) {
  Cluster cluster(Options(4, 70'000));
  const GradientFn gradient = GaussianGradient(13, 70'000);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 3; ++r) {
    EXPECT_LE(cluster.OpenAccumulator()->memory_bytes(), cluster.codec().accumulator_bytes());
    cluster.Round(gradient);
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecConformance,
                         ::testing::Combine(::testing::Values("dense:fp32", "dense:bf16", "dense:fixed32",
                                                              "dense:fixed16", "tagc:density=0.02,cells=8",
                                                              "tagc:density=0.02,cells=16",
                                                              "tagc:density=0.02,cells=32"),
                                            ::testing::ValuesIn(Backends())),
                         [](const auto& info) {
                           std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
                           for (char& c : name) {
                             if (!isalnum(static_cast<unsigned char>(c))) c = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace gradwire::testing
