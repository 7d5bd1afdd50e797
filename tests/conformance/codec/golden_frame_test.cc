// The bytes of small frames, compared with tests/conformance/codec/golden/*.hex. A difference means that frames of
// this build and of the last one do not understand each other: change proto/WIRE.md and the golden files in the same
// commit, with GRADWIRE_UPDATE_GOLDEN=1 in the environment of this test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/conformance/codec/codec_harness.h"

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
  if (std::getenv("GRADWIRE_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path) << Hex(bytes);
    return;
  }
  std::ifstream in(path);
  ASSERT_TRUE(in.good()) << path << " is missing";
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_EQ(Hex(bytes), text.str()) << "the bytes of " << name << " have changed";
}

// A codec, the stem of its files, and maybe an update codec.
struct Named {
  const char* name;
  const char* codec;
  const char* update_codec = "";
};

class GoldenFrame : public ::testing::TestWithParam<std::tuple<Named, std::string>> {};

TEST_P(GoldenFrame, BytesHaveNotChanged) {
  const auto& [named, backend] = GetParam();
  const auto& [name, codec, update_codec] = named;
  ClusterOptions options;
  options.codec = codec;
  options.update_codec = update_codec;
  options.backend = backend;
  options.workers = 2;
  options.elements = 100;
  options.run_elements = 64;
  options.seed = 42;
  Cluster cluster(options);
  // A short arithmetic pattern: no random number library takes part.
  const GradientFn gradient = [](uint32_t worker, uint64_t round, std::vector<float>* out) {
    for (size_t i = 0; i < out->size(); ++i) {
      (*out)[i] = static_cast<float>(static_cast<int>((i * 37 + worker * 11 + round * 5) % 101) - 50) * 0x1p-8f;
    }
  };
  for (int r = 0; r < 2; ++r) {
    const RoundResult result = cluster.Round(gradient);
    const std::string stem = std::string(name) + "_round" + std::to_string(r);
    CompareWithGolden(stem + "_push", Joined(result.frames[1].chunks));
    CompareWithGolden(stem + "_update", Joined(result.update_frame.chunks));
  }
}

// Ten elements, of which the sketch takes seven.
TEST(GoldenListedFrame, BytesHaveNotChanged) {
  ClusterOptions options;
  options.codec = "tagc:density=0.1,cells=8,form=sketch";
  options.workers = 2;
  options.elements = 100;
  options.run_elements = 64;
  options.seed = 42;
  Cluster cluster(options);
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

INSTANTIATE_TEST_SUITE_P(
    Codecs, GoldenFrame,
    ::testing::Combine(
        ::testing::Values(
            Named{"dense_fp32", "dense:fp32"}, Named{"dense_bf16", "dense:bf16"},
            Named{"dense_fixed32", "dense:fixed32"}, Named{"dense_fixed16", "dense:fixed16"},
            Named{"tagc_8", "tagc:density=0.1,cells=8,form=sketch"},
            Named{"tagc_16", "tagc:density=0.1,cells=16,form=sketch"},
            Named{"tagc_32", "tagc:density=0.1,cells=32,form=sketch"}, Named{"tagc_list", "tagc:density=0.1"},
            Named{"fp16", "fp16"}, Named{"onebit", "onebit"}, Named{"signsgd", "signsgd"}, Named{"signum", "signum"},
            Named{"efsignsgd", "efsignsgd"}, Named{"terngrad", "terngrad"}, Named{"qsgd", "qsgd:bits=4"},
            Named{"linear", "linear:bits=3"}, Named{"natural", "natural:bits=3"},
            Named{"topk_fp32", "topk:density=0.1"}, Named{"topk_fp16", "topk:density=0.1,values=fp16"},
            Named{"topk_bf16", "topk:density=0.1,values=bf16"}, Named{"topk_int8", "topk:density=0.1,values=int8"},
            Named{"topk_int4", "topk:density=0.1,values=int4"}, Named{"threshold", "threshold:value=0.15"},
            Named{"randomk", "randomk:density=0.1"}, Named{"dgc", "dgc:density=0.1,momentum=0.5,nesterov=true"},
            Named{"uniform", "uniform:bits=3"}, Named{"uniform_stochastic", "uniform:bits=4,rounding=stochastic"},
            Named{"thc", "thc:bits=4"}, Named{"zen", "zen"}, Named{"zen_bitmap", "zen:index=bitmap,values=fp16"},
            Named{"adaptive", "adaptive"}, Named{"powersgd", "powersgd:rank=2"},
            Named{"two_way_topk_fp16", "topk:density=0.1,values=fp16", "topk:density=0.1,values=fp16"},
            Named{"two_way_tagc_onebit", "tagc:density=0.1,cells=16,form=sketch", "onebit"},
            Named{"two_way_vote", "signsgd", "signsgd"}, Named{"two_way_bf16", "dense:fp32", "dense:bf16"}),
        ::testing::ValuesIn(Backends())),
    [](const auto& info) {
      std::string name = std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param);
      std::replace(name.begin(), name.end(), ':', '_');
      return name;
    });

}  // namespace
}  // namespace gradwire::testing
