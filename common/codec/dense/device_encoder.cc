// Dense frames of gradients on a device: quantised or rounded there; one wait per frame.
#include "common/codec/dense/device_encoder.h"

#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/frame/device_places.h"
#include "common/codec/frame/frame_header.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire::dense {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;
using kernels::cuda::RoundMemory;

class DeviceEncoder final : public Encoder {
 public:
  DeviceEncoder(const DenseShape& shape, DeviceBucket* bucket) : shape_(shape), bucket_(*bucket) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    const BucketLayout& layout = shape_.layout();
    const size_t width = static_cast<size_t>(shape_.width());
    // The largest magnitudes of the runs, then the values.
    const size_t values_at = shape_.fixed() ? JobMemory::Rounded(runs.size(), sizeof(uint32_t)) : 0;
    const size_t bytes = values_at + (id.round != 0 ? layout.elements * width : 0);
    GW_ASSIGN_OR_RETURN(const RoundMemory memory, RoundMemory::Make(&bucket_, bytes));
    GW_ASSIGN_OR_RETURN(const DevicePlaces places,
                        DevicePlaces::Make(layout, &bucket_, [&](size_t r, kernels::cuda::RunPlace* place) {
                          place->x = copies() ? const_cast<float*>(runs[r].gradient) : runs[r].pending;
                          if (shape_.fixed()) place->unit = UnitOf(plan.exponents[r]);
                        }));
    if (shape_.fixed()) {
      bucket_.backend().LargestOfRuns(places.runs(), reinterpret_cast<uint32_t*>(memory.data()), bucket_.stream());
    }
    if (id.round != 0) Launch(places.runs(), memory.data() + values_at);
    const uint8_t* results = bucket_.Fetch(memory.data(), bytes, &spill_);
    return Write(id, plan, results, results + values_at);
  }

 private:
  bool copies() const { return !shape_.fixed() && shape_.width() == 4; }  // floats as they are

  void Launch(const kernels::cuda::RunPlaces& runs, uint8_t* out) {
    if (copies()) {
      bucket_.backend().CopyRuns(runs, reinterpret_cast<float*>(out), bucket_.stream());
    } else if (shape_.fixed()) {
      bucket_.backend().QuantizeRuns(runs, shape_.limit(), shape_.width(), out, bucket_.stream());
    } else {
      bucket_.backend().SplitBf16Runs(runs, shape_.sent_limit().to, out, bucket_.stream());
    }
  }

  EncodedFrame Write(const FrameIdentity& id, const RoundPlan& plan, const uint8_t* largest,
                     const uint8_t* values) const {
    const BucketLayout& layout = shape_.layout();
    wire::FrameWriter writer = BeginPush(id, layout, plan);
    if (shape_.fixed()) {
      std::vector<int8_t> ranges(layout.runs.size());
      for (size_t i = 0; i < ranges.size(); ++i) {
        ranges[i] = static_cast<int8_t>(kernels::cuda::RangeOfLargest(reinterpret_cast<const uint32_t*>(largest)[i]));
      }
      const uint32_t n = static_cast<uint32_t>(ranges.size());
      writer.Add({wire::SegmentType::kRanges, 0, 0, n, n}, ranges.data());
    }
    const uint32_t width = static_cast<uint32_t>(shape_.width());
    for (uint64_t begin = 0; id.round != 0 && begin < layout.elements; begin += kSegmentElements) {
      const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, layout.elements - begin));
      writer.Add({shape_.type(), shape_.param(), begin, count, count * width}, values + begin * width);
    }
    EncodedFrame frame;
    frame.chunks = writer.Finish();
    frame.bytes = TotalSize(frame.chunks);
    frame.plan = plan;
    return frame;
  }

  const DenseShape shape_;
  DeviceBucket& bucket_;
  std::vector<uint8_t> spill_;
};

}  // namespace

std::unique_ptr<Encoder> MakeDeviceEncoder(const DenseShape& shape, DeviceBucket* bucket) {
  return std::make_unique<DeviceEncoder>(shape, bucket);
}

}  // namespace gradwire::dense
