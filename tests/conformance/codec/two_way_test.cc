// Two-way compression (proto/TWO_WAY.md): nothing is lost over any number of rounds, an identity changes no bit, the
// record says all that replay needs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "common/job/update_codec.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

using ::testing::HasSubstr;

struct Pair {
  const char* codec;
  const char* update_codec;
};

std::string NameOfPair(const ::testing::TestParamInfo<Pair>& info) {
  return NameOf(std::string(info.param.codec) + "_and_" + info.param.update_codec, std::to_string(info.index));
}

ClusterOptions OptionsOf(const Pair& pair, uint32_t workers, uint64_t elements = 1000) {
  ClusterOptions options;
  options.codec = pair.codec;
  options.update_codec = pair.update_codec;
  options.workers = workers;
  options.max_workers = 4;
  options.elements = elements;
  options.run_elements = 256;
  options.seed = 42;
  return options;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Codecs that keep what they do not send, both ways.
class TwoWayResidual : public ::testing::TestWithParam<Pair> {};

// CLAN: sum over rounds of p = sum of mean gradients - (mean of e_i + E), in float64, here times the number of workers.
TEST_P(TwoWayResidual, TheSumOfUpdatesTelescopes) {
  for (const uint32_t workers : {1u, 2u, 4u}) {
    SCOPED_TRACE(workers);
    Cluster cluster(OptionsOf(GetParam(), workers));
    const GradientFn gradient = DyadicGradient(7, 1000, 0.5, false);
    constexpr int kRounds = 25;
    double applied = 0, kept = 0;
    for (int r = 0; r < kRounds; ++r) cluster.Round(gradient);
    for (const double x : cluster.applied()) applied += std::abs(x);
    for (const float x : cluster.update_residual()) kept += std::abs(static_cast<double>(x));
    EXPECT_GT(applied, 0);
    // The mean of one worker may be what the codec can hold.
    EXPECT_TRUE(kept > 0 || workers == 1) << "the update codec has sent everything: the test shows nothing";
    // Gradients are multiples of 2^-12. Where values stay such, every sum is exact; else float32 rounds once for each
    // operation of a round, at magnitudes that residuals here do not exceed.
    const std::string codecs = std::string(GetParam().codec) + GetParam().update_codec;
    const bool exact = codecs.find("onebit") == std::string::npos && codecs.find("efsignsgd") == std::string::npos &&
                       codecs.find("=int") == std::string::npos && codecs.find("=2bit") == std::string::npos &&
                       codecs.find("qsgd") == std::string::npos;
    EXPECT_LE(cluster.LargestLoss(), exact ? 0.0 : kRounds * workers * 4 * 64 * 0x1p-24);
  }
}

TEST_P(TwoWayResidual, ReplayFromTheRecordLeavesTheSameResidual) {
  Cluster cluster(OptionsOf(GetParam(), 2));
  const GradientFn gradient = GaussianGradient(3, 1000);
  std::vector<float> replayed(1000);
  ResidualChange change;
  for (int r = 0; r < 12; ++r) {
    const RoundPlan plan = cluster.plan();
    const RoundResult result = cluster.Round(gradient);
    const auto update = DecodeUpdate(result.update_frame.chunks, cluster.job(), cluster.layout(), plan);
    ASSERT_TRUE(update.ok()) << update.status();
    EXPECT_EQ(result.update_frame.mean.empty(), r == 0);
    const absl::Status status = ReplayResidual(cluster.job(), cluster.layout(), plan, result.update_frame.mean, *update,
                                               cluster.backend(), replayed.data(), &change);
    ASSERT_TRUE(status.ok()) << status;
    change.ApplyTo(replayed.data());
    ASSERT_TRUE(SameBits(replayed, cluster.update_residual())) << "round " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, TwoWayResidual,
    ::testing::Values(Pair{"topk:density=0.05,values=fp16", "topk:density=0.05,values=fp16"},
                      Pair{"topk:density=0.1", "topk:density=0.02"},
                      Pair{"topk:density=0.1", "topk:density=0.02,values=bf16"},
                      Pair{"topk:density=0.1,values=int8", "topk:density=0.02,values=int4"},
                      Pair{"topk:density=0.1", "union:values=int8"}, Pair{"topk:density=0.1", "union:values=int6"},
                      Pair{"tagc:density=0.1", "union:values=int4"},
                      Pair{"topk:density=0.1,values=2bit", "topk:density=0.1,values=2bit"},
                      Pair{"topk:density=0.1", "union:values=2bit"}, Pair{"dense:fp32", "union:values=int4"},
                      Pair{"threshold:value=0.5", "threshold:value=3"},
                      Pair{"randomk:density=0.1", "randomk:density=0.02,values=bf16"}, Pair{"dense:fp32", "dense:bf16"},
                      Pair{"dense:fixed16", "topk:density=0.02"}, Pair{"tagc:density=0.1", "topk:density=0.02"},
                      Pair{"tagc:density=0.1,cells=32,form=sketch,slack=0.3", "fp16"}, Pair{"dense:bf16", "fp16"},
                      Pair{"onebit", "onebit"}, Pair{"efsignsgd", "efsignsgd"}, Pair{"topk:density=0.05", "onebit"}),
    NameOfPair);

class TwoWayIdentity : public ::testing::TestWithParam<const char*> {};

TEST_P(TwoWayIdentity, HasTheBitsOfNoUpdateCodec) {
  for (const uint32_t workers : {1u, 3u}) {
    Cluster plain(OptionsOf({GetParam(), ""}, workers)), identity(OptionsOf({GetParam(), "dense:fp32"}, workers));
    const GradientFn gradient = GaussianGradient(5, 1000);
    for (int r = 0; r < 6; ++r) {
      const RoundResult a = plain.Round(gradient), b = identity.Round(gradient);
      EXPECT_EQ(a.update.deferred, b.update.deferred);
      EXPECT_EQ(a.update.next, b.update.next);
      EXPECT_EQ(a.update.contributors, b.update.contributors);
      for (uint32_t run = 0; run < plain.layout().runs.size(); ++run) {
        std::vector<float> means_a(plain.layout().runs[run].length), means_b = means_a;
        a.update.MeanOfRun(plain.layout(), run, means_a.data());
        b.update.MeanOfRun(identity.layout(), run, means_b.data());
        EXPECT_TRUE(SameBits(means_a, means_b)) << "round " << r << " run " << run;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, TwoWayIdentity,
                         ::testing::Values("dense:fp32", "dense:fixed32", "tagc:density=0.05", "topk:density=0.05",
                                           "qsgd:bits=4"),
                         [](const auto& info) { return NameOf(info.param, std::to_string(info.index)); });

TEST(TwoWay, SignsOfSignsAreTheMajorityVote) {
  Cluster cluster(OptionsOf({"signsgd", "signsgd"}, 3));
  const GradientFn gradient = GaussianGradient(9, 1000);
  cluster.Calibrate(gradient);
  std::vector<int> votes(1000);
  std::vector<float> g(1000);
  for (uint32_t w = 0; w < 3; ++w) {
    gradient(w, cluster.round(), &g);
    for (size_t i = 0; i < g.size(); ++i) votes[i] += g[i] >= 0 ? 1 : -1;
  }
  const RoundResult result = cluster.Round(gradient);
  for (size_t i = 0; i < votes.size(); ++i) EXPECT_EQ(result.applied[i] / 3, votes[i] > 0 ? 1.0 : -1.0);
  // One bit each, not the 4 bytes of a mean.
  EXPECT_LT(TotalSize(result.update_frame.chunks), 64u + 32 + 24 + 1000 / 8 + 8);
  EXPECT_TRUE(SameBits(cluster.update_residual(), std::vector<float>(1000)));
}

// The union of what workers sent, beside the same in float32.
TEST(TwoWay, UnionsOfFewBitsTakeAThird) {
  for (const auto& [update_codec, most] :
       {std::pair("union:values=int4", 1.0 / 3), {"union:values=int6", 0.39}, {"union:values=2bit", 0.28}}) {
    for (const uint32_t workers : {1u, 4u}) {
      SCOPED_TRACE(::testing::Message() << update_codec << ", " << workers << " workers");
      const uint64_t n = 1u << 17;
      const GradientFn gradient = GaussianGradient(5, n);
      const auto bytes = [&](const char* of) {
        ClusterOptions options = OptionsOf({"topk:density=0.01,values=int8", of}, workers, n);
        options.run_elements = 4096;
        Cluster cluster(options);
        uint64_t sum = 0;
        for (int r = 0; r < 4; ++r) {
          const RoundResult result = cluster.Round(gradient);
          if (r > 0) sum += TotalSize(result.update_frame.chunks);  // the first calibrates
        }
        return static_cast<double>(sum);
      };
      const double wide = bytes("");
      EXPECT_GT(wide, 3 * 4 * 0.01 * n);
      EXPECT_LE(bytes(update_codec), most * wide);
    }
  }
}

TEST(TwoWay, StochasticCodecsDrawTheSameInEveryRunAndOthersInEveryRound) {
  for (const char* codec : {"terngrad", "qsgd:bits=2", "linear:bits=2", "natural:bits=2"}) {
    SCOPED_TRACE(codec);
    Cluster a(OptionsOf({"dense:fp32", codec}, 2)), b(OptionsOf({"dense:fp32", codec}, 2));
    const GradientFn gradient = [](uint32_t, uint64_t, std::vector<float>* out) {
      for (size_t i = 0; i < out->size(); ++i) (*out)[i] = static_cast<float>(i % 17) - 8;
    };
    a.Calibrate(gradient);
    b.Calibrate(gradient);
    const RoundResult first = a.Round(gradient);
    EXPECT_EQ(Joined(first.update_frame.chunks), Joined(b.Round(gradient).update_frame.chunks));
    EXPECT_NE(first.applied, a.Round(gradient).applied);
    EXPECT_TRUE(SameBits(a.update_residual(), std::vector<float>(1000)));
  }
}

TEST(TwoWay, AgreedPositionsAreThoseOfTheWorkersSoThatNothingIsDropped) {
  Cluster cluster(OptionsOf({"randomk:density=0.1", "randomk:density=0.1"}, 2));
  const GradientFn gradient = DyadicGradient(7, 1000, 1, false);
  for (int r = 0; r < 5; ++r) cluster.Round(gradient);
  EXPECT_TRUE(SameBits(cluster.update_residual(), std::vector<float>(1000)));
  EXPECT_EQ(cluster.LargestLoss(), 0);
}

TEST(TwoWay, BodiesOfOtherCodecsAreRefused) {
  Cluster top(OptionsOf({"dense:fp32", "topk:density=0.05"}, 2)), sign(OptionsOf({"dense:fp32", "signsgd"}, 2));
  const GradientFn gradient = GaussianGradient(5, 1000);
  top.Calibrate(gradient);
  sign.Calibrate(gradient);
  UpdateFrame signs = sign.Round(gradient).update_frame;
  const RoundResult result = top.Round(gradient);
  // The mean is not the update frame of a bucket that has an update codec.
  const absl::Status mean = DecodeUpdate(result.update_frame.mean, top.job(), top.layout(), top.plan()).status();
  EXPECT_EQ(mean.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(mean.message()), HasSubstr("does not belong in an update frame of topk"));
  EXPECT_TRUE(DecodeMean(result.update_frame.mean, top.job(), top.layout(), top.plan()).ok());
  // Both settings are in the shape digest.
  EXPECT_NE(top.layout().shape_digest, sign.layout().shape_digest);
  EXPECT_FALSE(DecodeUpdate(signs.chunks, top.job(), top.layout(), top.plan()).ok());
  const auto update = DecodeUpdate(result.update_frame.chunks, top.job(), top.layout(), top.plan());
  ASSERT_TRUE(update.ok());
  const std::vector<float> residual(1000);
  ResidualChange change;
  const absl::Status lacking =
      ReplayResidual(top.job(), top.layout(), top.plan(), {}, *update, top.backend(), residual.data(), &change);
  EXPECT_EQ(lacking.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lacking.message()), HasSubstr("lacks the mean"));
}

TEST(TwoWay, CodecsThatCannotBeUpdateCodecsAreRefusedWithWhatToUse) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
  spec.add_tensors()->set_name("w");
  const auto refused = [&spec](const char* codec) {
    spec.set_update_codec(codec);
    const absl::Status status = Job::Make(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << codec;
    return std::string(status.message());
  };
  EXPECT_THAT(refused("tagc"), HasSubstr("use topk"));
  EXPECT_THAT(refused("dense:fixed16"), HasSubstr("use dense:bf16"));
  EXPECT_THAT(refused("signum"), HasSubstr("use signsgd"));
  EXPECT_THAT(refused("topc"), HasSubstr("topc"));
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  EXPECT_THAT(refused("fp16"), HasSubstr("leave update_codec out"));
  spec.clear_rounds();
  // Canonical, so that equal settings have equal digests; a rule without one sends its tensors back as they are.
  spec.set_update_codec("topk");
  v1::CodecRule& rule = *spec.add_rules();
  rule.set_codec("dense:fp32");
  rule.set_pattern("w");
  const auto job = Job::Make(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->spec().update_codec(), ToString(*ParseCodecSpec("topk")));
  EXPECT_FALSE(job->update_codecs()[job->tensors()[0].codec].has_value());
  rule.set_pattern("other");
  EXPECT_TRUE(KeepsUpdateResidual(*Job::Make(spec), 0));
}

TEST(TwoWay, EmptyAndTinyBucketsAreUpdated) {
  for (const char* codec : {"topk:density=0.01,values=int8", "onebit", "fp16", "terngrad"}) {
    for (const uint64_t elements : {0u, 1u, 2u, 257u}) {
      SCOPED_TRACE(std::string(codec) + " " + std::to_string(elements));
      Cluster cluster(OptionsOf({"topk:density=0.5", codec}, 2, elements));
      for (int r = 0; r < 3; ++r) cluster.Round(GaussianGradient(5, elements));
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
