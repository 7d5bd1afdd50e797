// See dense_accumulator.h.
#include "common/codec/dense/device_accumulator.h"

#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/update/update.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire::dense {
namespace {

using kernels::Sign;
using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

// Words in device memory that checks lower: one for removals, whose values nobody asks about, one for Add, the others
// for frames on their way. Where more frames come at once, each further one is checked segment by segment.
constexpr size_t kRemovals = 0;
constexpr size_t kSingle = 1;
constexpr size_t kChecks = 64;
constexpr uint64_t kNoneBad = ~uint64_t{0};

// Of what the checks left, in pinned memory: behind the values.
size_t ChecksOffset(const DenseShape& shape) { return (shape.layout().elements * 4 + 7) / 8 * 8; }

class DeviceAccumulator final : public Accumulator {
 public:
  DeviceAccumulator(const DenseShape& shape, DeviceBucket* bucket)
      : shape_(shape),
        limit_bits_(shape.limit_bits()),
        bucket_(*bucket),
        ranges_(shape.fixed() ? shape.layout().runs.size() : 0) {
    for (size_t check = kChecks; check-- > kSingle + 1;) free_checks_.push_back(check);
  }

  absl::Status Allocate() {
    JobMemory& memory = bucket_.memory();
    if (shape_.fixed()) {
      GW_ASSIGN_OR_RETURN(sums_, memory.Take<int32_t>(shape_.layout().elements));
    } else {
      GW_ASSIGN_OR_RETURN(grid_, memory.Take<int64_t>(shape_.layout().elements));
    }
    GW_ASSIGN_OR_RETURN(first_bad_, memory.Take<uint64_t>(kChecks));
    return absl::OkStatus();
  }

  void Open(uint64_t round, const RoundPlan& plan) override {
    round_ = round;
    plan_ = plan;
    const size_t bytes = shape_.layout().elements * (shape_.fixed() ? sizeof(*sums_) : sizeof(*grid_));
    bucket_.runtime().Fill(shape_.fixed() ? static_cast<void*>(sums_) : grid_, 0, bytes, bucket_.stream());
    ranges_.Clear();
  }

  absl::Status Add(const Segment& s) override {
    Start(kSingle);
    GW_RETURN_IF_ERROR(Merge(s, kSingle));
    absl::Status status = Settle(kSingle);
    if (!status.ok()) Remove(s);
    return status;
  }

  void Remove(const Segment& s) override {
    if (s.type == SegmentType::kRanges) {
      ranges_.Merge(s, Sign::kSubtract);
    } else {
      Launch(s, Sign::kSubtract, kRemovals);
    }
  }

  std::unique_ptr<FrameMerge> NewFrameMerge() override;

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
    UpdateFrame update;
    if (contributors != 0 && round_ != 0) {
      update.stats.elements = shape_.layout().elements;
      update.decoded = Download(writer.header(), id.learning_rates);
      if (shape_.fixed()) {
        WriteSums({reinterpret_cast<const int32_t*>(bucket_.pinned()), shape_.layout().elements}, &writer);
      } else {
        WriteMeans(&writer);
      }
    }
    update.next = shape_.NextPlan(plan_, ranges_);
    if (shape_.fixed()) WriteExponents(update.next, &writer);
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override { return bucket_.pinned_bytes() + ranges_.memory_bytes(); }

 private:
  // One frame on its way; what its check found is in the word `check_`.
  class CheckedMerge final : public FrameMerge {
   public:
    CheckedMerge(DeviceAccumulator* accumulator, size_t check) : accumulator_(*accumulator), check_(check) {
      accumulator_.Start(check_);
    }
    ~CheckedMerge() override { accumulator_.free_checks_.push_back(check_); }
    absl::Status Add(const Segment& s) override { return accumulator_.Merge(s, check_); }
    absl::Status Settle() override { return accumulator_.Settle(check_); }

   private:
    DeviceAccumulator& accumulator_;
    const size_t check_;
  };

  void Start(size_t check) { bucket_.runtime().Fill(first_bad_ + check, 0xFF, sizeof(*first_bad_), bucket_.stream()); }

  absl::Status Merge(const Segment& s, size_t check) {
    if (s.type == SegmentType::kRanges && shape_.fixed()) {
      GW_RETURN_IF_ERROR(ranges_.Check(s));
      ranges_.Merge(s, Sign::kAdd);
      return absl::OkStatus();
    }
    GW_RETURN_IF_ERROR(shape_.CheckSegment(round_, s));
    Launch(s, Sign::kAdd, check);
    return absl::OkStatus();
  }

  void Launch(const Segment& s, Sign sign, size_t check) {
    const size_t width = static_cast<size_t>(shape_.width());
    bucket_.Send(s.payload(), [&](const uint8_t* piece, size_t offset, size_t size) {
      const uint64_t first = s.begin + offset / width;
      if (shape_.fixed()) {
        bucket_.backend().AddIntegersChecked(sums_ + first, piece, shape_.width(), size / width, sign, shape_.limit(),
                                             first, first_bad_ + check, bucket_.stream());
      } else {
        bucket_.backend().AddFloatsChecked(grid_ + first, piece, shape_.width(), size / width, sign, limit_bits_, first,
                                           first_bad_ + check, bucket_.stream());
      }
    });
  }

  absl::Status Settle(size_t check) {
    const size_t at = ChecksOffset(shape_) + check * sizeof(uint64_t);
    bucket_.Download(at, first_bad_ + check, sizeof(uint64_t));
    bucket_.Wait();
    uint64_t bad = 0;
    std::memcpy(&bad, bucket_.pinned() + at, sizeof(bad));
    if (bad == kNoneBad) return absl::OkStatus();
    const uint32_t bits = static_cast<uint32_t>(bad);
    if (shape_.fixed()) return shape_.OverLimit(bad >> 32, static_cast<int32_t>(bits));
    return OutOfGrid(*shape_.context.job, shape_.layout(), bad >> 32, std::bit_cast<float>(bits));
  }

  // The one wait of the round. The update shares the pinned memory.
  std::shared_ptr<const Update> Download(const wire::FrameHeader& header, std::span<const float> rates) {
    const uint64_t elements = shape_.layout().elements;
    auto update = std::make_shared<Update>(BeginUpdate(header));
    update->learning_rates.assign(rates.begin(), rates.end());
    update->exponents = plan_.exponents;
    if (shape_.fixed()) {
      update->body = Update::Body::kDenseInt;
      update->device_values = sums_;
    } else {
      bucket_.backend().GridToMean(grid_, elements, header.contributors, bucket_.means(), bucket_.stream());
      update->body = Update::Body::kDenseFloat;
      update->device_values = bucket_.means();
    }
    bucket_.Download(0, update->device_values, elements * 4);
    bucket_.Wait();
    update->dense.push_back(
        {0, static_cast<uint32_t>(elements), Bytes::Borrow({bucket_.pinned(), static_cast<size_t>(elements) * 4})});
    return update;
  }

  void WriteMeans(FrameWriter* writer) const {
    const uint64_t elements = shape_.layout().elements;
    for (uint64_t begin = 0; begin < elements; begin += kSegmentElements) {
      const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, elements - begin));
      writer->Add({SegmentType::kDenseF32, 0, begin, count, count * 4}, bucket_.pinned() + begin * 4);
    }
  }

  const DenseShape shape_;
  const uint32_t limit_bits_;
  DeviceBucket& bucket_;
  uint64_t round_ = 0;
  RoundPlan plan_;
  RangeHistogram ranges_;
  std::vector<size_t> free_checks_;

  // In device memory.
  int64_t* grid_ = nullptr;        // fp32, bf16: sums in units of 2^-kGridBits
  int32_t* sums_ = nullptr;        // fixed
  uint64_t* first_bad_ = nullptr;  // kChecks
};

std::unique_ptr<FrameMerge> DeviceAccumulator::NewFrameMerge() {
  if (free_checks_.empty()) return nullptr;
  const size_t check = free_checks_.back();
  free_checks_.pop_back();
  return std::make_unique<CheckedMerge>(this, check);
}

}  // namespace

DeviceNeeds NeedsOnDevice(const DenseShape& shape) {
  DeviceNeeds needs;
  const uint64_t elements = shape.layout().elements;
  needs.device_bytes = JobMemory::Rounded(elements, shape.fixed() ? sizeof(int32_t) : sizeof(int64_t)) +
                       JobMemory::Rounded(kChecks, sizeof(uint64_t));
  needs.pinned_bytes = ChecksOffset(shape) + kChecks * sizeof(uint64_t);
  needs.host_bytes = shape.fixed() ? RangeHistogram(1).memory_bytes() * shape.layout().runs.size() : 0;
  needs.means = true;
  return needs;
}

absl::StatusOr<std::unique_ptr<Accumulator>> MakeDeviceAccumulator(const DenseShape& shape, DeviceBucket* bucket) {
  const uint64_t elements = shape.layout().elements;
  if (elements >= uint64_t{1} << 32) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d has %d elements on shard %d, a device takes fewer than 2^32; lower bucket_bytes",
                        shape.layout().bucket, elements, shape.layout().shard));
  }
  auto accumulator = std::make_unique<DeviceAccumulator>(shape, bucket);
  GW_RETURN_IF_ERROR(accumulator->Allocate());
  return accumulator;
}

}  // namespace gradwire::dense
