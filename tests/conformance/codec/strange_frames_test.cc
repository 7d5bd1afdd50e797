// Frames that no encoder of ours makes, of strangers who know the format.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "common/codec/bits/index_code.h"
#include "common/codec/frame/frame_assembler.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::testing {
namespace {

class UnfinishedFrame : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Codecs, UnfinishedFrame, ::testing::ValuesIn(AllCodecs()),
                         [](const auto& info) { return NameOf(info.param, "cpu"); });

// The sums have room for one frame of each worker. Whether a frame is whole is known with its last chunk; one that
// never ends must not take the room of the others until then.
TEST_P(UnfinishedFrame, TakesNoRoomOfOthers) {
  ClusterOptions options;
  options.codec = GetParam();
  options.workers = 3;
  options.elements = 20'000;
  Cluster cluster(options);
  const GradientFn gradient = GaussianGradient(6, 20'000);
  cluster.Calibrate(gradient);
  const std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
  const auto accumulator = cluster.OpenAccumulator();
  const auto assembler = [&] {
    return std::make_unique<FrameAssembler>(&cluster.codec(), &cluster.layout(), accumulator.get(), &cluster.plan(),
                                            cluster.round(), uint64_t{1} << 30);
  };
  const ParsedFrame whole = ParseAll(frames[0]);
  std::vector<std::unique_ptr<FrameAssembler>> strangers;
  for (size_t i = 1; i < whole.segments.size(); ++i) {
    wire::FrameHeader header = whole.chunks[0].header;
    header.flags = 0;
    wire::FrameWriter writer(header, wire::kMaxChunkBytes);
    for (size_t s = 0; s <= i; ++s) writer.Add(whole.segments[s], whole.segments[s].data);
    writer.Add(whole.segments[i], whole.segments[i].data);
    const std::vector<Bytes> chunks = writer.Finish();
    auto chunk = wire::ParseChunk(chunks[0]);
    ASSERT_TRUE(chunk.ok());
    chunk->header.flags = 0;  // more of it is to come
    strangers.push_back(assembler());
    EXPECT_EQ(strangers.back()->Add(*chunk, {chunks.data(), 1}).code(), absl::StatusCode::kInvalidArgument)
        << "segment " << i << " twice";
  }
  for (const EncodedFrame& frame : frames) {
    const auto honest = assembler();
    for (const Bytes& bytes : frame.chunks) ASSERT_TRUE(honest->Add(*wire::ParseChunk(bytes), {&bytes, 1}).ok());
    EXPECT_TRUE(honest->complete());
    honest->Commit();
  }
}

// The update of such a round has no index, as its frames have none: values at other positions would shift the rest.
TEST(AgreedPositions, AreNotReplacedByOthers) {
  ClusterOptions options;
  options.codec = "randomk:density=0.1";
  options.workers = 1;
  options.elements = 1000;
  Cluster cluster(options);
  cluster.Calibrate(GaussianGradient(6, options.elements));
  const auto accumulator = cluster.OpenAccumulator();
  const uint32_t one_of_its_own[3] = {4, 17, std::bit_cast<uint32_t>(1.0f)};
  const uint32_t none[1] = {0};
  for (const IndexCoding coding : {IndexCoding::kWideCoordinates, IndexCoding::kEmpty}) {
    const bool empty = coding == IndexCoding::kEmpty;
    wire::Segment segment;
    segment.type = wire::SegmentType::kSparse;
    segment.param = static_cast<uint8_t>(coding);  // of float32
    segment.count = 1000;
    segment.bytes = empty ? sizeof(none) : sizeof(one_of_its_own);
    segment.data = reinterpret_cast<const uint8_t*>(empty ? none : one_of_its_own);
    EXPECT_EQ(accumulator->Add(segment).code(), absl::StatusCode::kInvalidArgument);
  }
  const std::vector<EncodedFrame> frames = cluster.EncodeAll(GaussianGradient(7, options.elements));
  MergeShuffled(frames, cluster.random(), accumulator.get());
  const auto update = accumulator->Finish(cluster.Identity(0), 1);
  ASSERT_TRUE(update.ok());
  EXPECT_TRUE(DecodeUpdate(update->chunks, cluster.job(), cluster.layout(), cluster.plan()).ok());
}

// An update of TAGC from a damaged journal, or a server of another build.
TEST(ListsOfAnUpdate, AreRefusedOutOfPlace) {
  ClusterOptions options;
  options.codec = "tagc:density=0.1";
  options.elements = 1000;
  Cluster cluster(options);
  cluster.Calibrate(GaussianGradient(6, options.elements));
  const RoundPlan plan = cluster.plan();
  const std::vector<Bytes> chunks = cluster.Round(GaussianGradient(7, options.elements)).update_frame.chunks;
  const wire::Chunk update = *wire::ParseChunk(chunks[0]);
  const auto list = std::find_if(update.segments.begin(), update.segments.end(),
                                 [](const wire::Segment& s) { return s.type == wire::SegmentType::kList; });
  ASSERT_NE(list, update.segments.end());
  const auto decodes = [&](const std::vector<wire::Segment>& lists) {
    wire::FrameWriter writer(update.header);
    for (const wire::Segment& s : update.segments) {
      if (s.type != wire::SegmentType::kList) writer.Add(s, s.data);
      if (&s != &*list) continue;
      for (const wire::Segment& l : lists) writer.Add(l, l.data);
    }
    return DecodeUpdate(writer.Finish(), cluster.job(), cluster.layout(), plan).ok();
  };
  EXPECT_TRUE(decodes({*list}));
  EXPECT_FALSE(decodes({*list, *list})) << "twice";
  wire::Segment beyond = *list;
  beyond.begin = 1;
  EXPECT_FALSE(decodes({beyond})) << "an element past the end";
  wire::Segment cut = *list;
  --cut.bytes;
  EXPECT_FALSE(decodes({cut})) << "without its end";
  wire::Segment index = *list;
  const uint16_t first = 0;
  index.type = wire::SegmentType::kIndex;
  index.param = static_cast<uint8_t>(IndexCoding::kCoordinates);
  index.count = 1;
  index.bytes = sizeof(first);
  index.data = reinterpret_cast<const uint8_t*>(&first);
  wire::Segment rest = *list;
  rest.begin = 1;
  rest.count = 999;
  rest.param = 0;  // empty
  rest.bytes = 0;
  EXPECT_TRUE(decodes({rest}));
  EXPECT_FALSE(decodes({index, rest})) << "a position without a sum";
}

}  // namespace
}  // namespace gradwire::testing
