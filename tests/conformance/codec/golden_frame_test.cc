// The bytes of small frames, compared with tests/conformance/codec/golden/*.hex. A difference means that frames of
// this build and of the last one do not understand each other: change proto/WIRE.md and the golden files in the same
// commit, with GRADWIRE_UPDATE_GOLDEN=1 in the environment of this test.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/codec/update/update.h"
#include "common/config/environment.h"
#include "common/job/codec_spec.h"
#include "tests/conformance/codec/codec_harness.h"
#include "tests/lib/must.h"

namespace gradwire::testing {
namespace {

std::string Hex(const std::vector<uint8_t>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    out += kDigits[bytes[i] >> 4];
    out += kDigits[bytes[i] & 15];
    out += i % 32 == 31 || i + 1 == bytes.size() ? '\n' : ' ';
  }
  return out;
}

void CompareWithGolden(const std::string& name, const std::vector<uint8_t>& bytes) {
  const std::string path = std::string(GRADWIRE_GOLDEN_DIR) + "/" + name + ".hex";
  if (!EnvironmentVariable("GRADWIRE_UPDATE_GOLDEN").empty()) {
    std::ofstream(path) << Hex(bytes);
    return;
  }
  std::ifstream in(path);
  ASSERT_TRUE(in.good()) << path << " is missing";
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_EQ(Hex(bytes), text.str()) << "the bytes of " << name << " have changed";
}

// The first two rounds: what the second worker pushes, and the update.
void CompareRounds(const std::string& name, const GradientFn& gradient, Cluster* cluster) {
  for (int r = 0; r < 2; ++r) {
    const RoundResult result = cluster->Round(gradient);
    const std::string stem = name + "_round" + std::to_string(r);
    CompareWithGolden(stem + "_push", Joined(result.frames[1].chunks));
    CompareWithGolden(stem + "_update", Joined(result.update_frame.chunks));
  }
}

// A codec, the stem of its files, and maybe an update codec.
struct Named {
  const char* name;
  const char* codec;
  const char* update_codec = "";
};

constexpr Named kGolden[] = {
    {"dense_fp32", "dense:fp32"},
    {"dense_bf16", "dense:bf16"},
    {"dense_fixed32", "dense:fixed32"},
    {"dense_fixed16", "dense:fixed16"},
    {"tagc_8", "tagc:density=0.1,cells=8,form=sketch"},
    {"tagc_16", "tagc:density=0.1,cells=16,form=sketch"},
    {"tagc_32", "tagc:density=0.1,cells=32,form=sketch"},
    {"tagc_list", "tagc:density=0.1,cells=8"},
    {"tagc_bits", "tagc:density=0.1,bits=2"},
    {"fp16", "fp16"},
    {"onebit", "onebit"},
    {"signsgd", "signsgd"},
    {"signum", "signum"},
    {"efsignsgd", "efsignsgd"},
    {"terngrad", "terngrad"},
    {"qsgd", "qsgd:bits=4"},
    {"linear", "linear:bits=3"},
    {"linear_l2", "linear:bits=3,norm=l2"},
    {"natural", "natural:bits=3"},
    {"natural_l2", "natural:bits=3,norm=l2"},
    {"topk_fp32", "topk:density=0.1"},
    {"topk_fp16", "topk:density=0.1,values=fp16"},
    {"topk_bf16", "topk:density=0.1,values=bf16"},
    {"topk_int8", "topk:density=0.1,values=int8"},
    {"topk_int6", "topk:density=0.1,values=int6"},
    {"topk_int4", "topk:density=0.1,values=int4"},
    {"topk_2bit", "topk:density=0.1,values=2bit"},
    {"threshold", "threshold:value=0.15"},
    {"randomk", "randomk:density=0.1"},
    {"randomk_bf16", "randomk:density=0.1,values=bf16"},
    {"dgc", "dgc:density=0.1,momentum=0.5,nesterov=true"},
    {"dgc_fp16", "dgc:density=0.1,values=fp16,momentum=0.5"},
    {"uniform", "uniform:bits=3"},
    {"uniform_stochastic", "uniform:bits=4,rounding=stochastic"},
    {"thc", "thc:bits=4"},
    {"zen", "zen:run=16"},
    {"zen_bitmap", "zen:index=bitmap,values=fp16,run=16"},
    {"zen_coo", "zen:index=coo,run=16"},
    {"zen_auto_bf16", "zen:index=auto,values=bf16,run=16"},
    {"adaptive", "adaptive"},
    {"powersgd", "powersgd:rank=2"},
    {"two_way_topk_fp16", "topk:density=0.1,values=fp16", "topk:density=0.1,values=fp16"},
    {"two_way_tagc_onebit", "tagc:density=0.1,cells=16,form=sketch", "onebit"},
    {"two_way_vote", "signsgd", "signsgd"},
    {"two_way_union_int4", "topk:density=0.1,values=int8", "union:values=int4"},
    {"two_way_union_int6", "topk:density=0.1,values=int8", "union:values=int6"},
    {"two_way_bf16", "dense:fp32", "dense:bf16"},
};

class GoldenFrame : public ::testing::TestWithParam<std::tuple<Named, std::string>> {};

ClusterOptions OptionsOf(const std::string& codec, uint64_t elements = 100, uint32_t run_elements = 64) {
  ClusterOptions options;
  options.codec = codec;
  options.workers = 2;
  options.elements = elements;
  options.run_elements = run_elements;
  options.seed = 42;
  return options;
}

// Arithmetic: no random number library takes part.
GradientFn ShortPattern() {
  return [](uint32_t worker, uint64_t round, std::vector<float>* out) {
    for (size_t i = 0; i < out->size(); ++i) {
      (*out)[i] = static_cast<float>(static_cast<int>((i * 37 + worker * 11 + round * 5) % 101) - 50) * 0x1p-8f;
    }
  };
}

TEST_P(GoldenFrame, BytesHaveNotChanged) {
  const auto& [named, backend] = GetParam();
  ClusterOptions options = OptionsOf(named.codec);
  options.update_codec = named.update_codec;
  options.backend = backend;
  Cluster cluster(options);
  CompareRounds(named.name, ShortPattern(), &cluster);
}

// Enough runs that their ranges and exponents travel as differences.
TEST(GoldenRunsFrame, BytesHaveNotChanged) {
  Cluster cluster(OptionsOf("tagc:density=0.02", 700));
  const GradientFn gradient = [](uint32_t worker, uint64_t round, std::vector<float>* out) {
    for (size_t i = 0; i < out->size(); ++i) {
      const float scale = i < 400 ? 0x1p-8f : 0x1p-11f;
      (*out)[i] = static_cast<float>(static_cast<int>((i * 37 + worker * 11 + round * 5) % 101) - 50) * scale;
    }
  };
  CompareRounds("tagc_runs", gradient, &cluster);
}

// Ten elements, of which the sketch takes seven.
TEST(GoldenListedFrame, BytesHaveNotChanged) {
  Cluster cluster(OptionsOf("tagc:density=0.1,cells=8,form=sketch"));
  cluster.Round([](uint32_t, uint64_t, std::vector<float>* out) { std::fill(out->begin(), out->end(), 0.25f); });
  RoundPlan plan = cluster.plan();
  plan.sketch_groups = 1;
  plan.cells_per_group = 150;
  std::vector<float> memory(100);
  for (size_t i = 0; i < 10; ++i) memory[i * 10 + 3] = static_cast<float>(static_cast<int>(i) - 4) * 0x1p-5f + 0x1p-6f;
  const std::vector<RunInput> runs = {{nullptr, memory.data(), {}}, {nullptr, memory.data() + 64, {}}};
  const absl::StatusOr<EncodedFrame> frame = cluster.codec().NewEncoder()->Encode(cluster.Identity(1001), plan, runs);
  ASSERT_TRUE(frame.ok()) << frame.status();
  CompareWithGolden("tagc_8_listed_push", Joined(frame->chunks));
}

// Enough integers, of which few are large, that what is larger than most travels as sets.
TEST(GoldenCodedFrame, BytesHaveNotChanged) {
  for (const auto& [name, codec] :
       {std::pair("tagc_coded", "tagc:density=0.2"), std::pair("topk_int8_coded", "topk:density=0.2,values=int8")}) {
    Cluster cluster(OptionsOf(codec, 2000, 2048));
    const GradientFn gradient = [](uint32_t worker, uint64_t round, std::vector<float>* out) {
      for (size_t i = 0; i < out->size(); ++i) {
        const float x = static_cast<float>(static_cast<int>((i * 37 + worker * 11 + round * 5) % 1009) - 504) * 0x1p-9f;
        (*out)[i] = x * x * x * x * x;
      }
    };
    CompareRounds(name, gradient, &cluster);
  }
}

// The bytes of a golden file.
std::vector<Bytes> Golden(const std::string& name) {
  std::ifstream in(std::string(GRADWIRE_GOLDEN_DIR) + "/" + name + ".hex");
  std::vector<uint8_t> bytes;
  for (std::string byte; in >> byte;) bytes.push_back(static_cast<uint8_t>(std::stoi(byte, nullptr, 16)));
  return {Bytes::FromVector(std::move(bytes))};
}

// Sums as journals have them of before they were lists, when `tagc` by itself had as many bits as tagc_list.
TEST(GoldenValues, AreReadAsTheListsThatTookTheirPlace) {
  const auto read = [](const std::string& codec, const std::string& name) {
    Cluster cluster(OptionsOf(codec));
    cluster.Round(ShortPattern());
    return testing_support::Must(DecodeUpdate(Golden(name), cluster.job(), cluster.layout(), cluster.plan()));
  };
  const Update now = read("tagc:density=0.1,cells=8", "tagc_list_round1_update");
  const Update before = read("tagc:density=0.1", "tagc_list_before_update");
  EXPECT_GT(now.positions.size(), 10u);
  EXPECT_EQ(now.positions, before.positions);
  EXPECT_EQ(now.integers, before.integers);
}

// The name of a codec, and each of its settings that is a word. Numbers (how many, how dense) are for the other suites.
std::set<std::string> FormsOf(const std::string& codec) {
  const absl::StatusOr<CodecSpec> parsed = ParseCodecSpec(codec);
  if (!parsed.ok()) return {parsed.status().ToString()};
  const std::pair<std::string, std::string> spec = absl::StrSplit(ToString(*parsed), absl::MaxSplits(':', 1));
  std::set<std::string> forms = {spec.first};
  for (const auto setting : absl::StrSplit(spec.second, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> value = absl::StrSplit(setting, '=');
    double number = 0;
    if (!absl::SimpleAtod(value.second, &number)) forms.insert(absl::StrCat(spec.first, ":", setting));
  }
  return forms;
}

TEST(AllCodecs, HasEveryCodecThatIsParsed) {
  std::set<std::string> forms;
  for (const std::string& codec : AllCodecs()) forms.merge(FormsOf(codec));
  for (const std::string& name : CodecNames()) EXPECT_TRUE(forms.contains(name)) << name << " is not in AllCodecs()";
}

TEST(GoldenFrames, EveryFormOfEveryCodecHasOne) {
  std::set<std::string> golden;
  for (const Named& named : kGolden) golden.merge(FormsOf(named.codec));
  for (const std::string& codec : AllCodecs()) {
    for (const std::string& form : FormsOf(codec)) {
      EXPECT_TRUE(golden.contains(form))
          << codec << ": no golden frame is of " << form << ": add such a codec to kGolden, run this test with "
          << "GRADWIRE_UPDATE_GOLDEN=1 in its environment, and commit the files that come";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, GoldenFrame,
                         ::testing::Combine(::testing::ValuesIn(kGolden), ::testing::ValuesIn(Backends())),
                         [](const auto& info) {
                           std::string name = std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param);
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

}  // namespace
}  // namespace gradwire::testing
