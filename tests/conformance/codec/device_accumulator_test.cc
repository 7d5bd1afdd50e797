// Accumulators whose sums lie on a device, here the host layer of tests/gpu, against those in host memory: the same
// update frames, the same errors, and what is taken back leaves nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/codec/codec_harness.h"
#include "tests/conformance/codec/device_side.h"

namespace gradwire::testing {
namespace {

using kernels::cuda::Lag;

// The bucket of a codec, and its accumulator there.
struct DeviceSums {
  DeviceSums(const Codec& codec, uint64_t elements, Lag lag) : DeviceSums(codec, codec.device_needs(), elements, lag) {}
  DeviceSums(const Codec& codec, const DeviceNeeds& needs, uint64_t elements, Lag lag)
      : side(needs.device_bytes, needs.means ? elements : 0, needs.pinned_bytes, lag),
        accumulator(*codec.NewDeviceAccumulator(side.bucket())) {}

  DeviceSide side;
  std::unique_ptr<Accumulator> accumulator;
};

// A frame on its way: its segments but for learning rates, merged in a random order between those of others.
struct FrameOnItsWay {
  FrameOnItsWay(const EncodedFrame& frame, Accumulator* accumulator)
      : parsed(ParseAll(frame)), accumulator(*accumulator), deferred(accumulator->NewFrameMerge()) {
    std::erase_if(parsed.segments, [](const auto& s) { return s.type == wire::SegmentType::kLearningRates; });
  }
  bool done() const { return next == parsed.segments.size(); }
  void Step() {
    const wire::Segment& s = parsed.segments[next++];
    ASSERT_TRUE((deferred != nullptr ? deferred->Add(s) : accumulator.Add(s)).ok());
  }
  void TakeOut() {
    for (size_t i = 0; i < next; ++i) accumulator.Remove(parsed.segments[i]);
  }

  ParsedFrame parsed;
  Accumulator& accumulator;
  std::unique_ptr<FrameMerge> deferred;
  size_t next = 0;
};

// All of `frames` in a random order, and between them the beginning of another one, which is taken back.
void MergeInterleaved(const std::vector<EncodedFrame>& frames, const EncodedFrame& abandoned, std::mt19937_64& random,
                      Accumulator* accumulator) {
  FrameOnItsWay other(abandoned, accumulator);
  std::vector<std::unique_ptr<FrameOnItsWay>> open;
  for (const EncodedFrame& f : frames) open.push_back(std::make_unique<FrameOnItsWay>(f, accumulator));
  while (!open.empty()) {
    if (random() % 2 == 0 && !other.done()) other.Step();
    const auto it = open.begin() + static_cast<ptrdiff_t>(random() % open.size());
    FrameOnItsWay& frame = **it;
    if (!frame.done()) {
      frame.Step();
      continue;
    }
    if (frame.deferred != nullptr) {
      ASSERT_TRUE(frame.deferred->Settle().ok());
    }
    open.erase(it);
  }
  other.TakeOut();
}

class DeviceAccumulator : public ::testing::TestWithParam<Lag> {};

TEST_P(DeviceAccumulator, MakesTheUpdateFramesOfTheHost) {
  for (const char* codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16", "tagc:density=0.001,cells=8",
                            "tagc:density=0.05,cells=16,form=sketch", "tagc:density=0.1,cells=32",
                            "tagc:density=0.1,form=sketch,slack=0.7", "tagc:density=0.05,bits=2"}) {
    for (const bool clustered : {false, true}) {
      for (uint64_t elements : {0u, 1u, 63u, 65u, 1025u, 70'001u}) {
        SCOPED_TRACE(std::string(codec) + ", " + std::to_string(elements) + " elements");
        Cluster cluster({.codec = codec, .workers = 3, .max_workers = 4, .elements = elements, .seed = 5});
        DeviceSums device(cluster.codec(), elements, GetParam());
        const GradientFn gradient = clustered ? DyadicGradient(3, elements, 0.03, true) : GaussianGradient(3, elements);
        for (int round = 0; round < 4; ++round) {
          std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
          const std::unique_ptr<Accumulator> host = cluster.OpenAccumulator();
          MergeShuffled(frames, cluster.random(), host.get());
          FrameIdentity id = cluster.Identity(0);
          id.nonfinite_rounds = static_cast<uint32_t>(cluster.round() / 2);
          const UpdateFrame expected = *host->Finish(id, cluster.workers());
          device.accumulator->Open(cluster.round(), cluster.plan());
          MergeInterleaved(frames, frames[0], cluster.random(), device.accumulator.get());
          if (HasFatalFailure()) return;
          auto update = device.accumulator->Finish(id, cluster.workers());
          ASSERT_TRUE(update.ok()) << update.status();
          EXPECT_EQ(DifferenceOfDecoded(cluster, *update), "");
          ASSERT_EQ(Joined(expected.chunks), Joined(update->chunks)) << "round " << round;
          EXPECT_EQ(update->next, expected.next);
          EXPECT_EQ(update->stats.elements, expected.stats.elements);
          EXPECT_EQ(update->stats.deferred, expected.stats.deferred);
          cluster.Close(std::move(frames), *std::move(update));
        }
      }
    }
  }
}

// Replaces a value of a segment. Integers are cut to the width of the codec.
std::vector<uint8_t> WithValue(const wire::Segment& s, size_t index, uint32_t bits) {
  std::vector<uint8_t> bytes(s.data, s.data + s.bytes);
  const size_t width = s.bytes / s.count;
  if (s.type == wire::SegmentType::kDenseBf16) bits >>= 16;
  std::memcpy(bytes.data() + index * width, &bits, width);
  return bytes;
}

TEST_P(DeviceAccumulator, RefusesWhatTheHostRefusesAndTakesItBack) {
  constexpr uint64_t kElements = 5000;
  const uint32_t infinity = std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity());
  const uint32_t nan = std::bit_cast<uint32_t>(std::numeric_limits<float>::quiet_NaN());
  const uint32_t large = std::bit_cast<uint32_t>(-0x1p18f);
  for (const char* codec : {"dense:fp32", "dense:bf16", "dense:fixed32", "dense:fixed16"}) {
    SCOPED_TRACE(codec);
    const bool fixed = std::string(codec).find("fixed") != std::string::npos;
    Cluster cluster({.codec = codec, .workers = 2, .elements = kElements, .seed = 5});
    DeviceSums device(cluster.codec(), kElements, GetParam());
    const GradientFn gradient = GaussianGradient(3, kElements);
    cluster.Calibrate(gradient);
    const std::vector<EncodedFrame> frames = cluster.EncodeAll(gradient);
    const std::unique_ptr<Accumulator> host = cluster.OpenAccumulator();
    MergeShuffled(frames, cluster.random(), host.get());
    const UpdateFrame expected = *host->Finish(cluster.Identity(0), 2);

    Accumulator& accumulator = *device.accumulator;
    accumulator.Open(cluster.round(), cluster.plan());
    const ParsedFrame parsed = ParseAll(frames[0]);
    const wire::Segment dense = parsed.segments.back();
    const std::vector<uint32_t> bad =
        fixed ? std::vector<uint32_t>{0x40007FFFu, 0x80008000u} : std::vector<uint32_t>{infinity, nan, large};
    for (const uint32_t bits : bad) {
      const std::vector<uint8_t> one = WithValue(dense, 4097, bits);
      wire::Segment segment = dense;
      segment.data = one.data();
      std::vector<uint8_t> two = WithValue(segment, 17, bits);
      segment.data = two.data();
      const std::unique_ptr<Accumulator> fresh = cluster.OpenAccumulator();
      const absl::Status refused = fresh->Add(segment);
      ASSERT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("element 17"));
      EXPECT_EQ(accumulator.Add(segment), refused);
      const auto deferred = accumulator.NewFrameMerge();
      const auto good = accumulator.NewFrameMerge();
      EXPECT_TRUE(deferred->Add(segment).ok());
      EXPECT_TRUE(good->Add(dense).ok());
      EXPECT_TRUE(good->Settle().ok()) << "another frame's values were bad, not this one's";
      EXPECT_EQ(deferred->Settle(), refused);
      accumulator.Remove(segment);
      accumulator.Remove(dense);
    }
    wire::Segment outside = dense;
    outside.begin = 1;
    EXPECT_EQ(accumulator.Add(outside), cluster.OpenAccumulator()->Add(outside));
    EXPECT_FALSE(accumulator.NewFrameMerge()->Add(outside).ok());
    // More frames at once than there are words for their checks.
    std::vector<std::unique_ptr<FrameMerge>> many;
    for (int i = 0; i < 100; ++i) many.push_back(accumulator.NewFrameMerge());
    EXPECT_NE(many.front(), nullptr);
    EXPECT_EQ(many.back(), nullptr) << "then Add is used";
    MergeShuffled(frames, cluster.random(), &accumulator);
    many.clear();
    EXPECT_NE(accumulator.NewFrameMerge(), nullptr);
    const auto update = accumulator.Finish(cluster.Identity(0), 2);
    ASSERT_TRUE(update.ok());
    EXPECT_EQ(Joined(update->chunks), Joined(expected.chunks)) << "something of a refused frame is left";
  }
}

// What a codec does itself, it does in host memory, which the backend of a device cannot read: on the host layer that
// would pass for right.
TEST(DeviceCodecs, AreNotMadeWithTheBackendOfADevice) {
  Cluster cluster({.codec = "topk:density=0.05", .workers = 1, .elements = 4096, .seed = 5});
  kernels::cuda::QueuedBackend device("queued", kernels::cuda::HostDeviceOptions{}, Lag::kLatest);
  const absl::Status refused = MakeCodec({&cluster.job(), &cluster.layout(), &device}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("the backend 'queued'"));
}

INSTANTIATE_TEST_SUITE_P(Lags, DeviceAccumulator, ::testing::Values(Lag::kLatest, Lag::kRandom),
                         [](const auto& info) { return info.param == Lag::kLatest ? "Latest" : "Random"; });

}  // namespace
}  // namespace gradwire::testing
