// What every codec promises (common/codec/codec.h), one body of tests over all of them: merged and decoded equals the
// exact sum, whatever the order; nothing is lost; what was added can be taken out; bad input is refused unharmed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "common/codec/frame/frame_assembler.h"
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
  bool ExactMeans(uint32_t workers) const { return TraitsOf(codec()).exact_means || (workers & (workers - 1)) == 0; }
  CodecTraits traits() const { return TraitsOf(codec()); }
};

// Those that promise more than all of them do.
class KeepingCodecConformance : public CodecConformance {};    // what is not sent waits in the residual
class UnbiasedCodecConformance : public CodecConformance {};   // rounding by chance
class FixedSizeCodecConformance : public CodecConformance {};  // the length of a frame is known beforehand

// What one frame stands for: its update frame, were it alone.
std::vector<double> ValuesOf(const Cluster& cluster, const EncodedFrame& frame) {
  auto accumulator = cluster.OpenAccumulator();
  for (const wire::Segment& s : ParseAll(frame).segments) {
    if (s.type == wire::SegmentType::kLearningRates) continue;
    EXPECT_TRUE(accumulator->Add(s).ok());
  }
  const auto alone = accumulator->Finish(cluster.Identity(0), 1);
  EXPECT_TRUE(alone.ok()) << alone.status();
  const auto update = DecodeUpdate(alone->chunks, cluster.job(), cluster.layout(), cluster.plan());
  EXPECT_TRUE(update.ok()) << update.status();
  return SumsOf(*update, cluster.layout());
}

// The sum over the workers of what each frame took out of its residual, compared with what the update stands for.
void ExpectRoundIsExact(Cluster& cluster, const GradientFn& gradient, double rounding) {
  const uint64_t round = cluster.round();
  const RoundResult result = cluster.Round(gradient);
  const size_t n = cluster.layout().elements;
  std::vector<double> taken(n, 0);
  for (uint32_t w = 0; w < cluster.workers(); ++w) {
    for (size_t i = 0; i < n; ++i)
      taken[i] += static_cast<double>(cluster.formed(w)[i]) - static_cast<double>(cluster.pending(w)[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    ASSERT_NEAR(result.applied[i], taken[i], rounding) << "element " << i << ", round " << round;
  }
}

// A shard applies what its accumulator decoded; workers, standbys and a shard that comes back apply the frame.
TEST_P(CodecConformance, WhatAnAccumulatorDecodedIsItsFrame) {
  for (const uint64_t n : {0, 1, 65, 9001}) {
    SCOPED_TRACE(::testing::Message() << n << " elements");
    Cluster cluster(Options(2, n));
    const GradientFn gradient = GaussianGradient(15, n);
    for (int r = 0; r < 6; ++r) {
      std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
      auto accumulator = cluster.OpenAccumulator();
      MergeShuffled(frames, cluster.random(), accumulator.get());
      FrameIdentity id = cluster.Identity(0);
      id.nonfinite_rounds = static_cast<uint32_t>(cluster.round() / 2);
      auto update = accumulator->Finish(id, 2);
      ASSERT_TRUE(update.ok()) << update.status();
      EXPECT_EQ(DifferenceOfDecoded(cluster, *update), "");
      cluster.Close(std::move(frames), *std::move(update));
    }
  }
}

// Merging is adding: the update frame of a round stands for the sum of what its frames stand for.
TEST_P(CodecConformance, TheUpdateFrameIsTheSumOfTheFrames) {
  for (uint64_t n : {0, 1, 65, 9001}) {
    SCOPED_TRACE(::testing::Message() << n << " elements");
    Cluster cluster(Options(4, n));
    const GradientFn gradient = GaussianGradient(14, n);
    cluster.Calibrate(gradient);
    for (int r = 0; r < 2; ++r) {
      std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
      std::vector<double> expected(n);
      for (const EncodedFrame& frame : frames) {
        const std::vector<double> values = ValuesOf(cluster, frame);
        for (size_t i = 0; i < n; ++i) expected[i] += values[i];
      }
      auto accumulator = cluster.OpenAccumulator();
      MergeShuffled(frames, cluster.random(), accumulator.get());
      auto update = accumulator->Finish(cluster.Identity(0), 4);
      ASSERT_TRUE(update.ok()) << update.status();
      const RoundResult result = cluster.Close(std::move(frames), *std::move(update));
      const bool deferred = !result.update.deferred.empty();
      for (size_t i = 0; i < n && !deferred; ++i) {
        // Means of floats are rounded once.
        const double sum = traits().exact_means ? expected[i] : static_cast<double>(static_cast<float>(expected[i]));
        ASSERT_NEAR(result.applied[i], sum, std::abs(sum) * 0x1p-23 + traits().rounding / 1000) << "element " << i;
      }
    }
  }
}

TEST_P(KeepingCodecConformance, SumsAreExactForEveryLength) {
  for (uint64_t n : {0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4097, 70'001}) {
    for (bool clustered : {false, true}) {
      SCOPED_TRACE(::testing::Message() << n << " elements, clustered " << clustered);
      Cluster cluster(Options(4, n, n + 1));
      const GradientFn gradient = DyadicGradient(7, n, 0.05, clustered);
      cluster.Calibrate(gradient);
      for (int r = 0; r < 3; ++r) ExpectRoundIsExact(cluster, gradient, traits().rounding);
      EXPECT_LE(cluster.LargestLoss(), 3 * traits().rounding);
    }
  }
}

TEST_P(KeepingCodecConformance, SumsAreExactForEveryNumberOfWorkers) {
  for (uint32_t workers : {1, 2, 3, 5, 8, 16, 33, 64}) {
    SCOPED_TRACE(::testing::Message() << workers << " workers");
    const uint64_t n = 6000;
    Cluster cluster(Options(workers, n, workers));
    const GradientFn gradient = DyadicGradient(11, n, 0.1, false);
    cluster.Calibrate(gradient);
    for (int r = 0; r < 2; ++r) {
      if (ExactMeans(cluster.workers())) {
        ExpectRoundIsExact(cluster, gradient, traits().rounding);
      } else {
        cluster.Round(gradient);
      }
    }
    const double rounding = workers * traits().rounding;
    EXPECT_LE(cluster.LargestLoss(), ExactMeans(cluster.workers()) ? rounding : rounding + 1e-5);
  }
}

TEST_P(KeepingCodecConformance, SumsAreExactForAMillionElements) {
  const uint64_t n = 1'000'007;
  Cluster cluster(Options(2, n));
  const GradientFn gradient = DyadicGradient(3, n, 0.02, false);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 2; ++r) ExpectRoundIsExact(cluster, gradient, traits().rounding);
  EXPECT_LE(cluster.LargestLoss(), 3 * traits().rounding);
}

TEST_P(KeepingCodecConformance, NothingIsLostOverManyRounds) {
  const uint64_t n = 20'000;
  Cluster cluster(Options(4, n));
  const GradientFn gradient = DyadicGradient(5, n, 0.3, false);
  cluster.Calibrate(gradient);
  for (int r = 0; r < 12; ++r) {
    cluster.Round(gradient);
    ASSERT_LE(cluster.LargestLoss(), (r + 1) * 4 * traits().rounding) << "after round " << r;
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
    auto full = cluster.OpenAccumulator();
    MergeShuffled(all, cluster.random(), full.get());
    auto dirty = cluster.OpenAccumulator();
    MergeShuffled(all, cluster.random(), dirty.get());
    for (const wire::Segment& s : taken_out.segments) {
      if (s.type != wire::SegmentType::kLearningRates) dirty->Remove(s);
    }
    const auto expected = clean->Finish(cluster.Identity(0), 3);
    const auto restored = dirty->Finish(cluster.Identity(0), 3);
    const auto with_all = full->Finish(cluster.Identity(0), 3);
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

TEST_P(KeepingCodecConformance, ReturnGivesBackEveryBit) {
  Cluster cluster(Options(2, 9000));
  const GradientFn gradient = GaussianGradient(6, 9000);
  cluster.Calibrate(gradient);
  cluster.Round(gradient);
  const auto frames = cluster.EncodeAll(gradient);
  const std::vector<float> formed = cluster.formed(0);
  EXPECT_NE(cluster.pending(0), formed);
  if (!cluster.codec().uses_residual()) std::fill(cluster.pending(0).begin(), cluster.pending(0).end(), 0.0f);
  std::vector<float*> runs;
  for (size_t i = 0; i < cluster.layout().runs.size(); ++i) {
    runs.push_back(cluster.pending(0).data() + cluster.layout().run_begin[i]);
  }
  ASSERT_TRUE(cluster.codec().Return(frames[0], nullptr, runs).ok());
  for (size_t i = 0; i < formed.size(); ++i) {
    ASSERT_NEAR(cluster.pending(0)[i], formed[i], traits().rounding / 100) << "element " << i;
  }
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
          bad.type = static_cast<wire::SegmentType>(1 + cluster.random()() % 16);
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
  RoundPlan expected = plan;
  // The next round is of another kind: it begins with nothing.
  if (!plan.factors.empty()) expected = cluster.codec().InitialPlan();
  EXPECT_EQ(decoded->next, expected);
  EXPECT_EQ(update->next, expected);
}

TEST(AgreedExponents, OutliveARoundOfZeros) {
  for (const char* codec : {"dense:fixed32", "dense:fixed16", "tagc:density=1,cells=16", "uniform:bits=8",
                            "uniform:bits=4,rounding=stochastic"}) {
    Cluster cluster({.codec = codec, .workers = 2, .elements = 100});
    const GradientFn ones = [](uint32_t, uint64_t, std::vector<float>* out) { out->assign(100, 1.0f); };
    for (int round = 0; round < 4; ++round) cluster.Round(ones);
    for (uint32_t w = 0; w < 2; ++w) cluster.pending(w).assign(100, 0.0f);  // but for rounding it is
    cluster.Round([](uint32_t, uint64_t, std::vector<float>*) {});
    for (const double sum : cluster.Round(ones).applied) EXPECT_NEAR(sum, 2, 1e-4) << codec;
  }
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

// Without its body it says the same of all else, and is no update frame.
TEST_P(CodecConformance, AnUpdateFrameWithoutItsBodyCarriesThePlanAndWhatWasDeferred) {
  Cluster cluster(Options(2, 5000));
  const GradientFn gradient = GaussianGradient(12, 5000);
  for (int r = 0; r < 3; ++r) {
    const RoundPlan plan = cluster.plan();
    const RoundResult result = cluster.Round(gradient);
    const auto chunks = WithoutBody(result.update_frame.chunks);
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    EXPECT_LE(TotalSize(*chunks), TotalSize(result.update_frame.chunks));
    const auto parsed = wire::ParseFrame(*chunks);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const auto decoded = DecodePlan(*parsed, cluster.job(), cluster.layout(), plan);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->round, result.update.round);
    EXPECT_EQ(decoded->contributors, result.update.contributors);
    EXPECT_EQ(decoded->learning_rates, result.update.learning_rates);
    EXPECT_EQ(decoded->next, result.update.next);
    EXPECT_EQ(decoded->deferred, result.update.deferred);
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeUpdate(*chunks, cluster.job(), cluster.layout(), plan).status()));
    const auto whole = wire::ParseFrame(result.update_frame.chunks);
    ASSERT_TRUE(whole.ok());
    EXPECT_TRUE(absl::IsInvalidArgument(DecodePlan(*whole, cluster.job(), cluster.layout(), plan).status()));
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

// Rounding by chance: the mean of many rounds is the gradient, within four standard errors.
TEST_P(UnbiasedCodecConformance, TheMeanOfManyRoundsIsTheGradient) {
  constexpr uint64_t kElements = 600;
  constexpr int kRounds = 800;
  ClusterOptions options = Options(1, kElements);
  options.run_elements = 256;
  Cluster cluster(options);
  const GradientFn once = GaussianGradient(15, kElements);
  const GradientFn gradient = [&once](uint32_t worker, uint64_t, std::vector<float>* out) { once(worker, 0, out); };
  cluster.Calibrate(gradient);
  std::vector<float> x(kElements);
  gradient(0, 0, &x);
  std::vector<double> sum(kElements), squares(kElements);
  for (int r = 0; r < kRounds; ++r) {
    const RoundResult result = cluster.Round(gradient);
    for (size_t i = 0; i < kElements; ++i) {
      sum[i] += result.applied[i];
      squares[i] += result.applied[i] * result.applied[i];
    }
  }
  // Groups of elements, since one that is far from its next level rarely reaches it. With and without signs: magnitudes
  // that are too small cancel in a plain sum.
  constexpr size_t kGroup = 50;
  for (size_t first = 0; first < kElements; first += kGroup) {
    double plain = 0, outward = 0, variance = 0;
    for (size_t i = first; i < first + kGroup; ++i) {
      const double mean = sum[i] / kRounds;
      const double error = mean - static_cast<double>(x[i]);
      plain += error;
      outward += x[i] < 0 ? -error : error;
      variance += (squares[i] / kRounds - mean * mean) / kRounds;
    }
    EXPECT_LT(std::abs(plain), 4 * std::sqrt(variance)) << "elements from " << first;
    EXPECT_LT(std::abs(outward), 4 * std::sqrt(variance)) << "elements from " << first;
  }
}

// The bytes of a frame are those of its definition: chunk header, learning rate, segment headers, packed values.
TEST_P(FixedSizeCodecConformance, FramesAreAsLargeAsTheirDefinitionSays) {
  for (uint64_t n : {1, 5, 63, 64, 65, 4096, 4097, 65'536, 70'001}) {
    Cluster cluster(Options(1, n));
    const GradientFn gradient = GaussianGradient(16, n);
    cluster.Calibrate(gradient);
    uint64_t expected = 64 + 24 + 8;
    if (traits().sends_ranges) expected += 24 + ((n + 4095) / 4096 + 7) / 8 * 8;
    for (uint64_t first = 0; first < n; first += 65'536) {
      uint64_t payload = 0;
      for (uint64_t at = first; at < std::min<uint64_t>(n, first + 65'536); at += 4096) {
        payload += (traits().run_bits(std::min<uint64_t>({4096, n - at, first + 65'536 - at})) + 7) / 8;
      }
      expected += 24 + (payload + 7) / 8 * 8;
    }
    EXPECT_EQ(cluster.EncodeAll(gradient)[0].bytes, expected) << n << " elements";
  }
}

// All zero, all negative, ties, subnormals: encoded, merged and applied like anything else.
TEST_P(CodecConformance, UnusualGradientsTravel) {
  const uint64_t n = 5000;
  const std::vector<std::function<float(size_t)>> patterns = {
      [](size_t) { return 0.0f; },
      [](size_t i) { return -1e-3f * static_cast<float>(i % 7 + 1); },
      [](size_t) { return 0.125f; },
      [](size_t) { return -0.0f; },
      [](size_t i) { return i % 2 == 0 ? 1e-41f : -1e-42f; },
      [](size_t i) { return i == 77 ? 2000.0f : 0.0f; },
  };
  for (size_t p = 0; p < patterns.size(); ++p) {
    SCOPED_TRACE(::testing::Message() << "pattern " << p);
    Cluster cluster(Options(2, n));
    const GradientFn gradient = [&](uint32_t, uint64_t, std::vector<float>* out) {
      for (size_t i = 0; i < out->size(); ++i) (*out)[i] = patterns[p](i);
    };
    cluster.Calibrate(gradient);
    for (int r = 0; r < 3; ++r) {
      const RoundResult result = cluster.Round(gradient);
      for (const double x : result.applied) ASSERT_TRUE(std::isfinite(x));
    }
    for (uint32_t w = 0; w < 2; ++w) {
      for (const float x : cluster.pending(w)) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

// The parameters of a suite: these codecs on every backend.
auto OnEveryBackend(const std::vector<std::string>& codecs) {
  return ::testing::Combine(::testing::ValuesIn(codecs), ::testing::ValuesIn(Backends()));
}
const auto kName = [](const auto& info) { return NameOf(std::get<0>(info.param), std::get<1>(info.param)); };

INSTANTIATE_TEST_SUITE_P(Codecs, CodecConformance, OnEveryBackend(AllCodecs()), kName);
INSTANTIATE_TEST_SUITE_P(Codecs, KeepingCodecConformance,
                         OnEveryBackend(CodecsWith([](const CodecTraits& t) { return t.keeps_rest; })), kName);
INSTANTIATE_TEST_SUITE_P(Codecs, UnbiasedCodecConformance,
                         OnEveryBackend(CodecsWith([](const CodecTraits& t) { return t.unbiased; })), kName);
INSTANTIATE_TEST_SUITE_P(Codecs, FixedSizeCodecConformance,
                         OnEveryBackend(CodecsWith([](const CodecTraits& t) { return t.run_bits != nullptr; })), kName);

}  // namespace
}  // namespace gradwire::testing
