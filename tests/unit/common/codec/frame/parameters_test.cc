// Parameter frames and update decoding: round trips, and refusal of everything that does not fit.
#include "common/codec/frame/parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/update/update.h"

namespace gradwire {
namespace {

using ::testing::HasSubstr;

struct Fixture {
  explicit Fixture(std::string codec, uint32_t workers = 2, uint64_t elements = 200'000, uint32_t staleness = 0) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(codec);
    spec.set_bucket_bytes(4 << 20);
    spec.set_max_workers(workers);
    if (staleness > 0) spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(staleness);
    auto* t = spec.add_tensors();
    t->set_name("w");
    t->add_shape(elements);
    job = std::make_unique<Job>(*Job::Make(spec));
    layout = std::make_unique<Layout>(*Layout::Make(*job, 2));
    backend = *kernels::MakeBackend("cpu");
    this->codec = *MakeCodec({job.get(), &at(), backend.get()});
  }
  const BucketLayout& at() const { return layout->at(0, 1); }

  std::vector<Bytes> Frame(uint64_t round, const RoundPlan& plan, std::vector<float> gradient) {
    std::vector<RunInput> runs;
    for (size_t i = 0; i < at().runs.size(); ++i) {
      runs.push_back({gradient.data() + at().run_begin[i], gradient.data() + at().run_begin[i], {}});
    }
    const float rate = 0.25f;
    return codec->NewEncoder()->Encode({1, 0, round, 77, {&rate, 1}}, plan, runs)->chunks;
  }

  std::unique_ptr<Job> job;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<kernels::Backend> backend;
  std::unique_ptr<Codec> codec;
};

std::vector<float> Ramp(size_t n) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = std::sin(static_cast<float>(i)) / 3;
  return v;
}

TEST(Parameters, StateRoundTrips) {
  Fixture f("tagc:density=0.01");
  const auto p = Ramp(f.at().elements), m = Ramp(f.at().elements), v = Ramp(f.at().elements);
  RoundPlan plan = f.codec->InitialPlan();
  plan.exponents[3] = -7;
  plan.sketch_groups = 1;
  plan.cells_per_group = 1200;
  const auto chunks =
      EncodeParameters(f.at(), PlanWindow(1, 9, {plan}), ParameterContent::kState, {p.data(), m.data(), v.data()});
  std::vector<float> p2(p.size()), m2(p.size()), v2(p.size());
  const auto got = DecodeParameters(chunks, *f.job, f.at(), 9, {p2.data(), m2.data(), v2.data()});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, PlanWindow(1, 9, {plan}));
  EXPECT_EQ(p, p2);
  EXPECT_EQ(m, m2);
  EXPECT_EQ(v, v2);
}

TEST(Parameters, CarryThePlansOfAllVersionsThatAreKept) {
  for (const char* codec : {"tagc:density=0.01", "dense:values=fixed16", "dense:fp32"}) {
    Fixture f(codec, 2, 200'000, 2);
    const auto p = Ramp(f.at().elements);
    std::vector<float> q(p.size());
    std::deque<RoundPlan> plans;
    for (uint64_t version = 0; version < 5; ++version) {
      RoundPlan& plan = plans.emplace_front(f.codec->InitialPlan());
      if (!plan.exponents.empty()) plan.exponents[0] = static_cast<int8_t>(version);
      const PlanWindow window(3, version, plans);
      const auto decode = [&](const PlanWindow& sent) {
        const auto chunks = EncodeParameters(f.at(), sent, ParameterContent::kFloat32, {p.data()});
        return DecodeParameters(chunks, *f.job, f.at(), version, {q.data()});
      };
      const auto got = decode(window);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(*got, window) << codec << " at version " << version;
      EXPECT_EQ(p, q);
      if (version == 0) continue;
      const std::deque<RoundPlan> fewer(window.newest_first().begin(), window.newest_first().end() - 1);
      EXPECT_THAT(decode(PlanWindow(3, version, fewer)).status().ToString(), HasSubstr("plans, expected"));
      std::deque<RoundPlan> more = window.newest_first();
      more.push_back(plans.back());
      EXPECT_EQ(decode(PlanWindow(4, version, more)).status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST(Parameters, Bf16RoundsToNearestEven) {
  Fixture f("dense:fp32");
  std::vector<float> p(f.at().elements, 1.00390625f);  // exactly between two bfloat16 values: ties to even, 1.0
  p[1] = 1.01171875f;                                  // ties to even, 1.015625
  p[2] = -3.0f;
  const auto chunks =
      EncodeParameters(f.at(), PlanWindow(1, 1, {RoundPlan()}), ParameterContent::kBf16, {p.data(), nullptr, nullptr});
  std::vector<float> q(p.size());
  ASSERT_TRUE(DecodeParameters(chunks, *f.job, f.at(), 1, {q.data(), nullptr, nullptr}).ok());
  EXPECT_EQ(q[0], 1.0f);
  EXPECT_EQ(q[1], 1.015625f);
  EXPECT_EQ(q[2], -3.0f);
}

TEST(Parameters, AreReadFromAnyPositionOn) {
  Fixture f("dense:fp32");
  const uint64_t n = f.at().elements;
  std::vector<float> p = Ramp(n), m = Ramp(n);
  std::reverse(m.begin(), m.end());
  std::mt19937 random(3);
  for (const auto content : {ParameterContent::kFloat32, ParameterContent::kBf16, ParameterContent::kState}) {
    const bool moments = content == ParameterContent::kState;
    const auto chunks = EncodeParameters(f.at(), PlanWindow(1, 1, {RoundPlan()}), content, {p.data(), m.data()});
    const auto parsed = wire::ParseFrame(chunks);
    ASSERT_TRUE(parsed.ok());
    const auto frame = ReadParameters(*parsed, *f.job, f.at(), 1, {.parameter = true, .first_moment = moments});
    ASSERT_TRUE(frame.ok()) << frame.status();
    for (int i = 0; i < 300; ++i) {
      const uint64_t begin = random() % n, count = random() % (i % 3 == 0 ? 2 : n - begin + 1);
      const bool of_moment = moments && i % 2 == 0;
      std::vector<float> got(count + 1, 77);
      frame->Read(of_moment ? wire::Array::kFirstMoment : wire::Array::kParameter, begin, count, got.data());
      for (uint64_t k = 0; k < count; ++k) {
        const float expected = of_moment ? m[begin + k] : p[begin + k];
        const float error = content == ParameterContent::kBf16 ? std::abs(expected) / 256 : 0;
        ASSERT_NEAR(got[k], expected, error) << begin << " + " << k;
      }
      EXPECT_EQ(got[count], 77);
    }
  }
}

TEST(Parameters, LeaveTheirTargetsAloneWhereTheyAreRefused) {
  Fixture f("dense:fp32");
  std::vector<float> p = Ramp(f.at().elements), out(p.size(), 5);
  p.back() = NAN;
  const auto chunks = EncodeInitialize(f.at(), 77, p.data());
  EXPECT_FALSE(DecodeParameters(chunks, *f.job, f.at(), 0, {.parameter = out.data()}).ok());
  EXPECT_EQ(out, std::vector<float>(p.size(), 5));
}

TEST(Parameters, RefusesWhatDoesNotFit) {
  Fixture f("dense:fp32");
  std::vector<float> p = Ramp(f.at().elements), out(p.size());
  const ParameterTargets targets{out.data(), nullptr, nullptr};
  auto chunks = EncodeInitialize(f.at(), 77, p.data());
  EXPECT_TRUE(DecodeParameters(chunks, *f.job, f.at(), 0, targets).ok());
  EXPECT_THAT(DecodeParameters(chunks, *f.job, f.at(), 1, targets).status().ToString(), HasSubstr("version 1"));
  EXPECT_FALSE(DecodeParameters(chunks, *f.job, f.layout->at(0, 0), 0, targets).ok());
  float moment[1];
  EXPECT_THAT(DecodeParameters(chunks, *f.job, f.at(), 0, {out.data(), moment, nullptr}).status().ToString(),
              HasSubstr("0 of"));
  p[70'000] = INFINITY;
  chunks = EncodeInitialize(f.at(), 77, p.data());
  EXPECT_THAT(DecodeParameters(chunks, *f.job, f.at(), 0, targets).status().ToString(),
              HasSubstr("tensor 'w', element"));
}

TEST(FrameAssembler, AbandonTakesAPartialFrameBackOut) {
  for (const char* codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc:density=0.05"}) {
    Fixture f(codec);
    RoundPlan plan = f.codec->InitialPlan();
    const float rate = 0.25f;
    const FrameIdentity id{1, 0, 0, 0, {&rate, 1}};
    auto accumulator = f.codec->NewAccumulator();
    accumulator->Open(0, plan);
    for (const Bytes& chunk : f.Frame(0, plan, Ramp(f.at().elements))) {
      const auto parsed = wire::ParseChunk(chunk);
      for (const auto& s : parsed->segments) {
        if (s.type != wire::SegmentType::kLearningRates) {
          ASSERT_TRUE(accumulator->Add(s).ok());
        }
      }
    }
    plan = accumulator->Finish(id, 1)->next;
    accumulator->Open(1, plan);
    auto undisturbed = f.codec->NewAccumulator();
    undisturbed->Open(1, plan);
    const auto frame = f.Frame(1, plan, Ramp(f.at().elements));
    const auto finish = [&](Accumulator& of) { return wire::Flatten(of.Finish({1, 0, 1, 0, {&rate, 1}}, 1)->chunks); };
    for (Accumulator* each : {accumulator.get(), undisturbed.get()}) {
      FrameAssembler whole(f.codec.get(), &f.at(), each, &plan, 1, 1 << 30);
      for (const Bytes& c : frame) ASSERT_TRUE(whole.Add(*wire::ParseChunk(c), {&c, 1}).ok()) << codec;
      ASSERT_TRUE(whole.complete()) << codec;
      whole.Commit();
    }
    {
      FrameAssembler partial(f.codec.get(), &f.at(), accumulator.get(), &plan, 1, 1 << 30);
      const auto other = f.Frame(1, plan, std::vector<float>(f.at().elements, 0.125f));
      // As a network delivers it: in slices, and parsed from memory that is soon used for something else.
      const size_t third = other[0].size() / 3;
      const Bytes slices[] = {other[0].Slice(0, third), other[0].Slice(third, third),
                              other[0].Slice(2 * third, other[0].size() - 2 * third)};
      std::vector<uint8_t> scratch;
      ASSERT_TRUE(partial.Add(*wire::ParseReceived(slices, &scratch), slices).ok());
      std::fill(scratch.begin(), scratch.end(), 0xA5);
    }
    const Bytes expected = finish(*undisturbed), after = finish(*accumulator);
    EXPECT_EQ(std::vector<uint8_t>(expected.span().begin(), expected.span().end()),
              std::vector<uint8_t>(after.span().begin(), after.span().end()))
        << codec;
  }
}

// Other clients may cut segments as they like; what a block holds from the round before must never show.
TEST(DenseAccumulator, MergesSegmentsCutAnywhere) {
  Fixture f("dense:fp32");
  const float rate = 0.25f;
  const uint64_t elements = f.at().elements;
  const std::vector<float> values = Ramp(elements);
  auto accumulator = f.codec->NewAccumulator();
  std::mt19937 random(3);
  std::vector<uint8_t> expected;
  for (uint64_t round = 1; round < 6; ++round) {
    accumulator->Open(round, {});
    for (int worker = 0; worker < 3; ++worker) {
      std::vector<std::pair<uint64_t, uint32_t>> cuts;
      for (uint64_t begin = 0; begin < elements;) {
        const uint64_t longest = round == 1 ? elements : 1 + random() % 9000;
        const uint32_t count = static_cast<uint32_t>(std::min(longest, elements - begin));
        cuts.emplace_back(begin, count);
        begin += count;
      }
      std::shuffle(cuts.begin(), cuts.end(), random);
      for (const auto& [begin, count] : cuts) {
        wire::Segment s;
        s.type = wire::SegmentType::kDenseF32;
        s.begin = begin;
        s.count = count;
        s.bytes = count * 4;
        s.data = reinterpret_cast<const uint8_t*>(values.data() + begin);
        ASSERT_TRUE(accumulator->Add(s).ok());
        if (random() % 4 == 0) {
          accumulator->Remove(s);
          ASSERT_TRUE(accumulator->Add(s).ok());
        }
      }
    }
    const Bytes update = wire::Flatten(accumulator->Finish({0, 0, 1, 0, {&rate, 1}}, 3)->chunks);
    if (round == 1) expected.assign(update.span().begin(), update.span().end());
    EXPECT_TRUE(std::ranges::equal(update.span(), expected)) << "round " << round;
  }
}

TEST(FrameAssembler, RefusesAndRecovers) {
  Fixture f("dense:fp32");
  const RoundPlan plan;
  auto accumulator = f.codec->NewAccumulator();
  accumulator->Open(1, plan);
  const auto add = [&](const std::vector<Bytes>& frame, uint64_t limit = 1 << 30) {
    FrameAssembler a(f.codec.get(), &f.at(), accumulator.get(), &plan, 1, limit);
    absl::Status status;
    for (const Bytes& c : frame) status.Update(a.Add(*wire::ParseChunk(c), {&c, 1}));
    return status;
  };
  std::vector<float> bad = Ramp(f.at().elements);
  bad[5000] = NAN;
  EXPECT_THAT(add(f.Frame(1, plan, bad)).ToString(), HasSubstr("tensor 'w', element"));
  EXPECT_THAT(add(f.Frame(2, plan, Ramp(f.at().elements))).ToString(), HasSubstr("round 2"));
  EXPECT_THAT(add(f.Frame(1, plan, Ramp(f.at().elements)), 1000).ToString(), HasSubstr("limit is 1000"));
  RoundPlan other;
  other.sketch_groups = 9;
  EXPECT_EQ(add(f.Frame(1, other, Ramp(f.at().elements))).code(), absl::StatusCode::kFailedPrecondition);
  const auto frame = f.Frame(1, plan, Ramp(f.at().elements));
  ASSERT_GE(frame.size(), 1u);
  EXPECT_TRUE(add(frame).ok());
}

TEST(Update, RefusesForeignAndMixedFrames) {
  Fixture f("dense:fp32");
  auto accumulator = f.codec->NewAccumulator();
  accumulator->Open(1, {});
  const float rate = 0.25f;
  const auto update = accumulator->Finish({1, 0, 1, 0, {&rate, 1}}, 2);
  ASSERT_TRUE(update.ok());
  const auto decoded = DecodeUpdate(update->chunks, *f.job, f.at(), {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->contributors, 2u);
  EXPECT_EQ(decoded->learning_rates, std::vector<float>{0.25f});
  std::vector<float> means(f.at().elements, 1.0f);
  decoded->CopyDense(0, means.size(), means.data());
  EXPECT_EQ(means, std::vector<float>(f.at().elements, 0.0f));
  EXPECT_FALSE(DecodeUpdate(update->chunks, *f.job, f.layout->at(0, 0), {}).ok());
  EXPECT_FALSE(DecodeUpdate(f.Frame(1, {}, Ramp(f.at().elements)), *f.job, f.at(), {}).ok());
}

TEST(Update, RefusesLearningRatesThatAreNotFinite) {
  Fixture f("dense:fp32");
  for (const float rate : {NAN, INFINITY, -INFINITY}) {
    auto accumulator = f.codec->NewAccumulator();
    accumulator->Open(1, {});
    const auto update = accumulator->Finish({1, 0, 1, 0, {&rate, 1}}, 2);
    ASSERT_TRUE(update.ok());
    const absl::Status status = DecodeUpdate(update->chunks, *f.job, f.at(), {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr("is not finite"));
  }
}

// An encoder reads an exponent per run.
TEST(Update, RefusesAPlanWithoutTheExponentsOfItsCodec) {
  for (const std::string codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc"}) {
    Fixture f(codec);
    const size_t runs = f.at().runs.size();
    RoundPlan plan;
    plan.exponents.assign(f.codec->InitialPlan().exponents.empty() ? 0 : runs, 0);
    const std::vector<float> values(f.at().elements, 0.5f);
    const auto check = [&] {
      std::vector<float> out(values.size());
      const auto frame =
          EncodeParameters(f.at(), PlanWindow(1, 1, {plan}), ParameterContent::kFloat32, {values.data()});
      return DecodeParameters(frame, *f.job, f.at(), 1, {out.data()}).status();
    };
    EXPECT_TRUE(check().ok()) << codec << ": " << check();
    plan.exponents.assign(runs - plan.exponents.size(), 0);
    EXPECT_EQ(check().code(), absl::StatusCode::kInvalidArgument) << codec;
    EXPECT_THAT(check().ToString(), HasSubstr("exponents of")) << codec;
  }
}

// A faulty server's next plan would make the worker's own encoder fail a round later, or worse.
TEST(Update, RefusesAPlanThatNoShardWouldPublish) {
  for (const std::string codec : {"dense:fixed16", "tagc:density=0.01"}) {
    Fixture f(codec);
    const float rate = 0.25f;
    const auto decode = [&](int8_t exponent, uint32_t groups, uint32_t cells) {
      wire::FrameHeader header;
      header.kind = wire::FrameKind::kUpdate;
      header.bucket = f.at().bucket;
      header.shard = static_cast<uint16_t>(f.at().shard);
      header.round = 1;
      header.shape_digest = f.at().shape_digest;
      wire::FrameWriter writer(header);
      writer.Add({wire::SegmentType::kLearningRates, 0, 0, 1, 4}, &rate);
      std::vector<int8_t> exponents(f.at().runs.size(), -10);
      exponents.back() = exponent;
      const uint32_t runs = static_cast<uint32_t>(exponents.size());
      writer.Add({wire::SegmentType::kExponents, 0, 0, runs, runs}, exponents.data());
      const uint32_t geometry[2] = {groups, cells};
      writer.Add({wire::SegmentType::kGeometry, 0, 0, 2, 8}, geometry);
      return DecodeUpdate(writer.Finish(), *f.job, f.at(), f.codec->InitialPlan()).status();
    };
    EXPECT_TRUE(decode(-80, 0, 0).ok()) << decode(-80, 0, 0);
    EXPECT_TRUE(decode(kUncalibrated, 0, 0).ok());
    for (const int exponent : {-127, -81, 65, 127}) {
      const absl::Status status = decode(static_cast<int8_t>(exponent), 0, 0);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(status.ToString(), HasSubstr(absl::StrFormat("exponent %d of run", exponent)));
      EXPECT_THAT(status.ToString(), HasSubstr("outside [-80, 64]"));
    }
    EXPECT_EQ(decode(-10, 1, 1200).ok(), codec.starts_with("tagc")) << decode(-10, 1, 1200);
    for (const auto& [groups, cells] :
         {std::pair{1u, 0u}, {0u, 3u}, {1u, 1201u}, {1u << 20, 3u << 10}, {UINT32_MAX, UINT32_MAX}}) {
      const absl::Status status = decode(-10, groups, cells);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << groups << " " << cells;
      EXPECT_THAT(status.ToString(), HasSubstr(absl::StrFormat("%d groups of %d cells", groups, cells)));
    }
    // The same plan, pulled with the parameters by a late joiner.
    RoundPlan plan = f.codec->InitialPlan();
    plan.exponents[0] = 100;
    const auto p = Ramp(f.at().elements);
    const auto frame =
        EncodeParameters(f.at(), PlanWindow(1, 3, {plan}), ParameterContent::kFloat32, {p.data(), nullptr, nullptr});
    std::vector<float> out(f.at().elements);
    EXPECT_THAT(DecodeParameters(frame, *f.job, f.at(), 3, {out.data(), nullptr, nullptr}).status().ToString(),
                HasSubstr("exponent 100 of run 0"));
  }
}

// Nobody contributed to round 0: the runs are still uncalibrated. Round 1 then carries ranges and zeros, and nothing is
// lost.
TEST(DenseCodec, CalibratesLateWhenRoundZeroWasEmpty) {
  for (const char* codec : {"dense:fixed32", "dense:fixed16"}) {
    Fixture f(codec);
    const float rate = 0.25f;
    auto accumulator = f.codec->NewAccumulator();
    RoundPlan plan = f.codec->InitialPlan();
    std::vector<float> pending = Ramp(f.at().elements);
    const std::vector<float> gradient = pending;
    for (uint64_t round : {1, 2}) {
      accumulator->Open(round, plan);
      std::vector<RunInput> runs;
      for (size_t i = 0; i < f.at().runs.size(); ++i)
        runs.push_back({nullptr, pending.data() + f.at().run_begin[i], {}});
      const auto frame = f.codec->NewEncoder()->Encode({1, 0, round, 77, {&rate, 1}}, plan, runs);
      ASSERT_TRUE(frame.ok()) << frame.status();
      for (const Bytes& chunk : frame->chunks) {
        const auto parsed = wire::ParseChunk(chunk);
        for (const auto& s : parsed->segments) {
          if (s.type != wire::SegmentType::kLearningRates) {
            ASSERT_TRUE(accumulator->Add(s).ok());
          }
        }
      }
      if (round == 1) {
        EXPECT_EQ(pending, gradient);
      }
      const auto update = accumulator->Finish({1, 0, round, 0, {&rate, 1}}, 1);
      ASSERT_TRUE(update.ok());
      const auto decoded = DecodeUpdate(update->chunks, *f.job, f.at(), plan);
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      plan = update->next;
      if (round == 1) continue;
      std::vector<float> mean(4096);
      for (uint32_t run = 0; run < f.at().runs.size(); ++run) {
        decoded->MeanOfRun(f.at(), run, mean.data());
        for (uint32_t i = 0; i < f.at().runs[run].length; ++i) {
          const uint64_t position = f.at().run_begin[run] + i;
          ASSERT_EQ(double{mean[i]} + double{pending[position]}, double{gradient[position]}) << position;
        }
      }
    }
  }
}

// begin + count wraps around 2^64: refused, nothing is read or written outside.
TEST(RangeHistogram, RefusesARangeThatWrapsAround) {
  RangeHistogram histogram(10);
  const uint8_t ranges[8] = {};
  wire::Segment s;
  s.type = wire::SegmentType::kRanges;
  s.data = ranges;
  s.bytes = s.count = 8;
  s.begin = UINT64_MAX - 7;
  EXPECT_FALSE(histogram.Check(s).ok());
  s.begin = 3;
  EXPECT_FALSE(histogram.Check(s).ok());
  s.begin = 2;
  EXPECT_TRUE(histogram.Check(s).ok());
}

}  // namespace
}  // namespace gradwire
