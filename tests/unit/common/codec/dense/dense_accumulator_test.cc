// Frames of float32 in any order, in part, taken out again or refused: the update has the mean of those that stayed, by
// the formula.
#include "common/codec/dense/dense_accumulator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/math/grid.h"

namespace gradwire::dense {
namespace {

constexpr uint64_t kElements = 2 * kSegmentElements + 5003;
constexpr uint32_t kWorkers = 5;

// One worker's frame on its way into the accumulator.
struct Incoming {
  std::vector<float> values;
  uint64_t segment = kSegmentElements;  // elements of each
  uint64_t taken = 0;
  std::unique_ptr<FrameMerge> merge;
  bool begun = false, over = false, counts = false;

  wire::Segment At(uint64_t begin) const {
    const uint32_t count = static_cast<uint32_t>(std::min(segment, kElements - begin));
    const wire::SegmentHeader header{wire::SegmentType::kDenseF32, 0, begin, count, count * 4};
    return {header, reinterpret_cast<const uint8_t*>(values.data() + begin)};
  }
};

class DenseAccumulatorTest : public ::testing::Test {
 protected:
  DenseAccumulatorTest() {
    v1::JobSpec spec;
    spec.set_name("unit");
    spec.add_tensors()->set_name("w");
    spec.mutable_tensors(0)->add_shape(kElements);
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec("dense:fp32");
    spec.set_bucket_bytes(1 << 30);
    spec.set_max_workers(kWorkers);
    job_ = std::make_unique<Job>(*Job::Make(spec));
    layout_ = std::make_unique<Layout>(*Layout::Make(*job_, 1));
    accumulator_ = MakeAccumulator({{job_.get(), &layout_->at(0, 0), backend_.get()}, DenseSpec{}});
  }

  size_t Below(size_t n) { return random_() % n; }

  Incoming NewFrame() {
    Incoming frame;
    std::normal_distribution<float> normal(0, std::ldexp(1.0f, static_cast<int>(Below(30)) - 18));
    frame.values.resize(kElements);
    for (float& x : frame.values) x = normal(random_);
    if (Below(4) == 0) frame.segment = 10'000 + Below(50'000);  // blocks come in part
    return frame;
  }

  absl::Status Take(Incoming& frame, const wire::Segment& segment) {
    return frame.merge != nullptr ? frame.merge->Add(segment) : accumulator_->Add(segment);
  }

  void TakeOut(Incoming& frame) {
    if (frame.merge != nullptr) {
      frame.merge->Revoke();
      frame.merge.reset();
    } else {
      for (uint64_t begin = 0; begin < frame.taken; begin += frame.segment) accumulator_->Remove(frame.At(begin));
    }
    frame.over = true;
  }

  // A step of its way.
  void Advance(Incoming& frame) {
    if (!frame.begun) frame.merge = accumulator_->NewFrameMerge();
    frame.begun = true;
    if (frame.taken == kElements) {
      frame.over = frame.counts = true;
      frame.merge.reset();
      return;
    }
    const size_t chance = Below(40);
    if (chance == 0) return TakeOut(frame);
    const wire::Segment segment = frame.At(frame.taken);
    if (chance == 1) {
      float& bad = frame.values[frame.taken + Below(segment.count)];
      const float good = bad;
      bad = Below(2) == 0 ? std::numeric_limits<float>::quiet_NaN() : 300'000.0f;
      EXPECT_FALSE(Take(frame, segment).ok());
      bad = good;
      // Of the first frame a part may be merged now.
      if (frame.merge != nullptr || Below(2) == 0) return TakeOut(frame);
    }
    ASSERT_TRUE(Take(frame, segment).ok());
    frame.taken += segment.count;
  }

  void ExpectMeanOf(const std::vector<Incoming>& frames) {
    std::vector<int64_t> sums(kElements);
    uint32_t contributors = 0;
    for (const Incoming& frame : frames) {
      if (!frame.counts) continue;
      ++contributors;
      for (uint64_t i = 0; i < kElements; ++i)
        sums[i] += std::llrint(std::ldexp(static_cast<double>(frame.values[i]), kernels::kGridBits));
    }
    const float rate = 0.5f;
    const auto update = accumulator_->Finish({0, 0, 1, 0, {&rate, 1}}, contributors);
    ASSERT_TRUE(update.ok()) << update.status();
    uint64_t seen = 0;
    const auto chunks = wire::ParseFrame(update->chunks);
    ASSERT_TRUE(chunks.ok());
    for (const wire::Chunk& chunk : *chunks) {
      for (const wire::Segment& s : chunk.segments) {
        if (s.type != wire::SegmentType::kDenseF32) continue;
        for (uint32_t i = 0; i < s.count; ++i) {
          float mean;
          std::memcpy(&mean, s.data + 4 * size_t{i}, 4);
          const float sum = std::ldexp(static_cast<float>(sums[s.begin + i]), -kernels::kGridBits);
          ASSERT_EQ(mean, sum / static_cast<float>(contributors)) << "element " << s.begin + i;
        }
        seen += s.count;
      }
    }
    EXPECT_EQ(seen, contributors == 0 ? 0 : kElements);
  }

  const std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<Accumulator> accumulator_;
  std::mt19937 random_{11};
};

TEST_F(DenseAccumulatorTest, HasTheMeanOfThoseThatStayed) {
  for (int round = 0; round < 150; ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round);
    accumulator_->Open(1, {});
    std::vector<Incoming> frames(1 + Below(kWorkers));
    for (Incoming& frame : frames) frame = NewFrame();
    // Those that go on together share blocks in every state.
    const size_t together = 1 + Below(frames.size());
    for (size_t left = frames.size(); left > 0;) {
      size_t nth = Below(std::min(together, left));
      for (Incoming& frame : frames) {
        if (frame.over || nth-- > 0) continue;
        Advance(frame);
        if (HasFatalFailure()) return;
        left -= frame.over;
        break;
      }
    }
    for (Incoming& frame : frames) {  // of a worker that was lost behind its last segment
      if (!frame.counts || Below(6) != 0) continue;
      TakeOut(frame);
      frame.counts = false;
    }
    ExpectMeanOf(frames);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace gradwire::dense
