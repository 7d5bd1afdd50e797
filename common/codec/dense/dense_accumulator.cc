// See dense_accumulator.h.
#include "common/codec/dense/dense_accumulator.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "common/base/large_array.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/update/update.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/fixed_point.h"

namespace gradwire::dense {
namespace {

using kernels::Sign;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

// Of an accumulator, checked and then merged, first stored, or cleared at once. Few enough to stay in the cache from
// the one to the other; enough that the fence behind stores that pass the caches costs nothing.
constexpr uint64_t kBlockElements = 16384;

// What a block of an accumulator holds.
enum class Block : uint8_t {
  kOld,    // of the round before: nothing was added since Open
  kFirst,  // the values of the round's first frame, as they came
  kSum,
};

template <typename T>
int32_t LoadInteger(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

template <typename T>
inline __attribute__((always_inline)) bool AllWithinAs(const uint8_t* values, size_t n, int32_t limit) {
  int32_t over = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t v = LoadInteger<T>(values + sizeof(T) * i);
    over |= static_cast<int32_t>(v > limit) | static_cast<int32_t>(v < -limit);
  }
  return over == 0;
}

// Without an early exit, so that the compiler vectorises it.
GW_CLONES bool AllWithin(const uint8_t* values, int width, size_t n, int32_t limit) {
  return width == 4 ? AllWithinAs<int32_t>(values, n, limit) : AllWithinAs<int16_t>(values, n, limit);
}

class FirstMerge;

// The round's first frame is stored as it comes, which takes half of the memory traffic of sums, and is told apart from
// the others' until it is committed: it can be taken out without having been held.
class DenseAccumulator final : public Accumulator {
 public:
  explicit DenseAccumulator(const DenseShape& shape)
      : shape_(shape),
        limit_bits_(shape.limit_bits()),
        blocks_((shape.layout().elements + kBlockElements - 1) / kBlockElements),
        ranges_(shape.fixed() ? shape.layout().runs.size() : 0) {
    if (shape.fixed()) {
      integers_.resize(shape.layout().elements);
    } else {
      grid_.resize(shape.layout().elements);
    }
  }

  void Open(uint64_t round, const RoundPlan& plan) override {
    round_ = round;
    plan_ = plan;
    std::fill(blocks_.begin(), blocks_.end(), Block::kOld);
    ranges_.Clear();
    first_taken_ = false;
  }

  absl::Status Add(const Segment& s) override {
    GW_RETURN_IF_ERROR(CheckShape(s));
    if (s.type == SegmentType::kRanges) {
      ranges_.Merge(s, Sign::kAdd);
      return absl::OkStatus();
    }
    UnpackAll(s.begin, s.count);
    uint64_t bad = s.begin + s.count;
    ForEachBlock(s.begin, s.begin + s.count, [&](size_t block, uint64_t begin, uint64_t end, bool whole) {
      if (bad < begin) return;
      if (AreGood(s, begin, end)) {
        MergeBlock<Sign::kAdd>(block, begin, end, whole, ValuesAt(s, begin), shape_.width());
      } else {
        bad = begin;
      }
    });
    if (bad == s.begin + s.count) return absl::OkStatus();
    // An error's text takes memory: what was merged is out before.
    Merge<Sign::kSubtract>(s.data, shape_.width(), s.begin, bad - s.begin);
    return CheckValues(s, bad, s.begin + s.count);
  }

  void Remove(const Segment& s) override {
    if (s.type == SegmentType::kRanges) {
      ranges_.Merge(s, Sign::kSubtract);
    } else {
      Merge<Sign::kSubtract>(s.data, shape_.width(), s.begin, s.count);
    }
  }

  std::unique_ptr<FrameMerge> NewFrameMerge() override;

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
    UpdateFrame update;
    if (contributors != 0 && shape_.CarriesValues(round_)) {
      for (size_t block = 0; block < blocks_.size(); ++block) ClearOld(block);
      update.stats.elements = shape_.layout().elements;
      if (shape_.fixed()) {
        update.decoded = Decoded(writer.header(), id.learning_rates);
        WriteSums(integers_, &writer);
      } else {
        WriteMeans(contributors, &writer);
      }
    }
    update.next = shape_.NextPlan(plan_, ranges_);
    if (shape_.fixed()) WriteExponents(update.next, &writer);
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override {
    return grid_.size() * 8 + integers_.size() * 4 + blocks_.size() + ranges_.memory_bytes();
  }

 private:
  friend class FirstMerge;

  // All of a segment but its dense values.
  absl::Status CheckShape(const Segment& s) const {
    if (s.type == SegmentType::kRanges && shape_.fixed()) return ranges_.Check(s);
    return shape_.CheckSegment(round_, s);
  }
  const uint8_t* ValuesAt(const Segment& s, uint64_t position) const {
    return s.data + (position - s.begin) * static_cast<uint64_t>(shape_.width());
  }

  // Whether CheckValues passes them; allocates nothing.
  bool AreGood(const Segment& s, uint64_t begin, uint64_t end) const {
    const uint8_t* values = ValuesAt(s, begin);
    if (shape_.fixed()) return AllWithin(values, shape_.width(), end - begin, shape_.limit());
    return shape_.backend().FindOutOfGrid(values, shape_.width(), end - begin, limit_bits_, nullptr) < 0;
  }

  // The values at [begin, end) of a segment that CheckShape has passed.
  absl::Status CheckValues(const Segment& s, uint64_t begin, uint64_t end) const {
    if (AreGood(s, begin, end)) return absl::OkStatus();
    const uint8_t* values = ValuesAt(s, begin);
    if (shape_.fixed()) return OverLimitError(values, begin);
    const int64_t bad = shape_.backend().FindOutOfGrid(values, shape_.width(), end - begin, limit_bits_, nullptr);
    return OutOfGridError(s, begin - s.begin + static_cast<uint64_t>(bad));
  }

  // Sums stay in range only if every contribution keeps to its share (IntegerLimit). Of the first that does not.
  absl::Status OverLimitError(const uint8_t* values, uint64_t begin) const {
    const int32_t limit = shape_.limit();
    const auto integer = [values, width = shape_.width()](size_t i) {
      return width == 4 ? LoadInteger<int32_t>(values + 4 * i) : LoadInteger<int16_t>(values + 2 * i);
    };
    uint64_t i = 0;
    while (integer(i) <= limit && integer(i) >= -limit) ++i;
    return shape_.OverLimit(begin + i, integer(i));
  }

  absl::Status OutOfGridError(const Segment& s, uint64_t index) const {
    float value = 0;
    if (shape_.width() == 4) {
      std::memcpy(&value, s.data + 4 * index, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, s.data + 2 * index, sizeof(bits));
      value = kernels::Bf16ToFloat(bits);
    }
    return OutOfGrid(*shape_.context.job, shape_.layout(), s.begin + index, value);
  }

  // Calls f(block, begin, end, whole) for the part of every block that [begin, end) covers.
  template <typename F>
  void ForEachBlock(uint64_t begin, uint64_t end, F f) const {
    for (uint64_t next = 0; begin < end; begin = next) {
      const uint64_t block = begin / kBlockElements;
      const uint64_t block_end = std::min((block + 1) * kBlockElements, shape_.layout().elements);
      next = std::min(block_end, end);
      f(block, begin, next, begin == block * kBlockElements && next == block_end);
    }
  }
  uint64_t SizeOf(size_t block) const {
    return std::min<uint64_t>(kBlockElements, shape_.layout().elements - block * kBlockElements);
  }

  void UnpackAll(uint64_t first, uint64_t count) {
    ForEachBlock(first, first + count, [&](size_t block, uint64_t, uint64_t, bool) { Unpack(block); });
  }

  // Nothing is merged when memory runs out.
  template <Sign sign>
  void Merge(const uint8_t* values, int width, uint64_t first, uint64_t count) {
    UnpackAll(first, count);
    ForEachBlock(first, first + count, [&](size_t block, uint64_t begin, uint64_t end, bool whole) {
      MergeBlock<sign>(block, begin, end, whole, values + (begin - first) * static_cast<uint64_t>(width), width);
    });
  }

  // What comes first to an old block is stored there, without clearing and reading it. `block` is not kFirst.
  template <Sign sign>
  void MergeBlock(size_t block, uint64_t begin, uint64_t end, bool whole, const uint8_t* values, int width) {
    if (sign == Sign::kAdd && whole && blocks_[block] == Block::kOld) {
      blocks_[block] = Block::kSum;
      Assign(begin, values, width, end - begin);
      return;
    }
    ClearOld(block);
    if (shape_.fixed()) {
      shape_.backend().AddIntegers(integers_.data() + begin, values, width, end - begin, sign, nullptr);
    } else {
      shape_.backend().AddFloats(grid_.data() + begin, values, width, end - begin, sign, nullptr);
    }
  }

  void Assign(uint64_t begin, const uint8_t* values, int width, uint64_t n) {
    if (shape_.fixed()) {
      shape_.backend().AssignIntegers(integers_.data() + begin, values, width, n, nullptr);
    } else {
      shape_.backend().AssignFloats(grid_.data() + begin, values, width, n, nullptr);
    }
  }

  // The values of a kFirst block: floats as they came, in the memory of the sums; integers, which are sums already.
  uint8_t* FirstOf(size_t block) {
    const uint64_t begin = block * kBlockElements;
    return shape_.fixed() ? reinterpret_cast<uint8_t*>(integers_.data() + begin)
                          : reinterpret_cast<uint8_t*>(grid_.data() + begin);
  }
  int first_width() const { return shape_.fixed() ? 4 : shape_.width(); }

  // Stores a whole block of the first frame, unless there are values that CheckValues refuses.
  absl::Status StoreFirst(const Segment& s, size_t block, uint64_t begin) {
    const uint64_t n = SizeOf(block);
    const uint8_t* values = ValuesAt(s, begin);
    auto* words = reinterpret_cast<int32_t*>(FirstOf(block));
    if (shape_.width() == 4) {
      // Past the cache, which the next values need. A block of which this is not kept is still an old one.
      const kernels::WordRange range =
          shape_.fixed() ? kernels::WordRange::Integers(shape_.limit()) : kernels::WordRange::Floats(limit_bits_);
      if (!shape_.backend().AssignWords(words, values, n, range)) return CheckValues(s, begin, begin + n);
    } else {
      GW_RETURN_IF_ERROR(CheckValues(s, begin, begin + n));
      if (shape_.fixed()) {
        shape_.backend().AssignIntegers(words, values, shape_.width(), n, nullptr);
      } else {
        std::memcpy(FirstOf(block), values, n * 2);
      }
    }
    blocks_[block] = Block::kFirst;
    return absl::OkStatus();
  }

  // Makes a kFirst block one of sums. What the first frame put there is kept while it may be taken out again.
  void Unpack(size_t block);

  void ClearOld(size_t block) {
    if (blocks_[block] != Block::kOld) return;
    blocks_[block] = Block::kSum;
    const auto begin = static_cast<ptrdiff_t>(block * kBlockElements);
    if (shape_.fixed()) {
      std::fill_n(integers_.begin() + begin, SizeOf(block), 0);
    } else {
      std::fill_n(grid_.begin() + begin, SizeOf(block), 0);
    }
  }

  // What DecodeUpdate makes of the update frame, its sums where they are.
  std::shared_ptr<const Update> Decoded(const wire::FrameHeader& header, std::span<const float> rates) const {
    auto update = std::make_shared<Update>(BeginUpdate(header));
    update->learning_rates.assign(rates.begin(), rates.end());
    update->exponents = plan_.exponents;
    update->body = Update::Body::kDenseInt;
    const auto* sums = reinterpret_cast<const uint8_t*>(integers_.data());
    update->dense.push_back({0, static_cast<uint32_t>(integers_.size()), Bytes::Borrow({sums, integers_.size() * 4})});
    return update;
  }

  void WriteMeans(uint32_t contributors, FrameWriter* writer) {
    for (uint64_t first = 0; first < grid_.size(); first += kSegmentElements) {
      const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, grid_.size() - first));
      // Payloads are 8-byte aligned (WIRE.md), so they may be written as float32.
      auto* out = reinterpret_cast<float*>(writer->Begin({SegmentType::kDenseF32, 0, first, count, count * 4}));
      for (uint64_t begin = first; begin < first + count; begin += kBlockElements) {
        const uint64_t n = std::min(kBlockElements, first + count - begin);
        const size_t block = begin / kBlockElements;
        if (blocks_[block] == Block::kFirst) {
          shape_.backend().FloatsToMean(FirstOf(block), shape_.width(), n, contributors, out + (begin - first));
        } else {
          shape_.backend().GridToMean(grid_.data() + begin, n, contributors, out + (begin - first), nullptr);
        }
      }
      writer->End();
    }
  }

  DenseShape shape_;
  const uint32_t limit_bits_;
  uint64_t round_ = 0;
  RoundPlan plan_;
  LargeArray<int64_t> grid_;      // fp32, bf16: sums in units of 2^-kGridBits
  LargeArray<int32_t> integers_;  // fixed: sums
  std::vector<Block> blocks_;
  RangeHistogram ranges_;
  bool first_taken_ = false;     // since Open, a frame was the first
  FirstMerge* first_ = nullptr;  // while it may be taken out; all kFirst blocks are its
};

static_assert(kSegmentElements % kBlockElements == 0);

// The first frame of a round.
class FirstMerge final : public FrameMerge {
 public:
  explicit FirstMerge(DenseAccumulator* accumulator) : accumulator_(*accumulator) { accumulator_.first_ = this; }
  ~FirstMerge() override { accumulator_.first_ = nullptr; }

  absl::Status Add(const Segment& s) override {
    GW_RETURN_IF_ERROR(accumulator_.CheckShape(s));
    if (s.type == SegmentType::kRanges) {
      Save(ranges_, s.data, 1, s.begin, s.count);
      accumulator_.ranges_.Merge(s, Sign::kAdd);
      return absl::OkStatus();
    }
    absl::Status status;
    accumulator_.ForEachBlock(s.begin, s.begin + s.count, [&](size_t block, uint64_t begin, uint64_t end, bool whole) {
      if (!status.ok()) return;
      const bool first = whole && accumulator_.blocks_[block] == Block::kOld;
      status = first ? accumulator_.StoreFirst(s, block, begin) : accumulator_.CheckValues(s, begin, end);
      if (first || !status.ok()) return;
      const uint8_t* values = accumulator_.ValuesAt(s, begin);
      const int width = accumulator_.shape_.width();
      Save(values_, values, width, begin, end - begin);
      accumulator_.Merge<Sign::kAdd>(values, width, begin, end - begin);
    });
    return status;
  }
  absl::Status Settle() override { return absl::OkStatus(); }

  bool revocable() const override { return true; }
  void Revoke() override {
    for (const Saved& saved : values_)
      accumulator_.Merge<Sign::kSubtract>(saved.bytes.data(), saved.width, saved.begin, saved.count);
    for (const Saved& saved : ranges_) {
      const wire::SegmentHeader header{SegmentType::kRanges, 0, saved.begin, saved.count, saved.count};
      accumulator_.ranges_.Merge(Segment{header, saved.bytes.data()}, Sign::kSubtract);
    }
    bool untouched = true;
    for (Block& block : accumulator_.blocks_) {
      if (block == Block::kFirst) block = Block::kOld;
      untouched = untouched && block == Block::kOld;
    }
    accumulator_.first_taken_ = !untouched;
    values_.clear();
    ranges_.clear();
  }

  // Others add to this block from here on.
  void Keep(size_t block) {
    Save(values_, accumulator_.FirstOf(block), accumulator_.first_width(), block * kBlockElements,
         accumulator_.SizeOf(block));
  }

 private:
  struct Saved {
    std::vector<uint8_t> bytes;
    int width;
    uint64_t begin;
    uint32_t count;
  };
  static void Save(std::vector<Saved>& list, const uint8_t* values, int width, uint64_t begin, uint64_t count) {
    list.push_back({std::vector<uint8_t>(values, values + count * static_cast<uint64_t>(width)), width, begin,
                    static_cast<uint32_t>(count)});
  }

  DenseAccumulator& accumulator_;
  // What cannot be told apart in the accumulator.
  std::vector<Saved> values_;
  std::vector<Saved> ranges_;
};

void DenseAccumulator::Unpack(size_t block) {
  if (blocks_[block] != Block::kFirst) return;
  const std::vector<uint8_t> values(FirstOf(block), FirstOf(block) + SizeOf(block) * first_width());
  if (first_ != nullptr) first_->Keep(block);
  blocks_[block] = Block::kSum;  // from here on nothing may fail
  if (shape_.fixed()) return;
  shape_.backend().AssignFloats(grid_.data() + block * kBlockElements, values.data(), shape_.width(), SizeOf(block),
                                nullptr);
}

std::unique_ptr<FrameMerge> DenseAccumulator::NewFrameMerge() {
  if (first_taken_) return nullptr;
  auto merge = std::make_unique<FirstMerge>(this);
  first_taken_ = true;
  return merge;
}

}  // namespace

std::unique_ptr<Accumulator> MakeAccumulator(const DenseShape& shape) {
  return std::make_unique<DenseAccumulator>(shape);
}

size_t AccumulatorBytes(const DenseShape& shape) {
  const uint64_t elements = shape.layout().elements;
  return elements * (shape.fixed() ? 4 : 8) + elements / kBlockElements + 1 +
         (shape.fixed() ? shape.layout().runs.size() * 128 : 0);
}

}  // namespace gradwire::dense
