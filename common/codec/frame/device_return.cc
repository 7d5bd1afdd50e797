// See return.h.
#include "common/codec/frame/device_return.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/run_pieces.h"
#include "common/wire/frame.h"

namespace gradwire {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::RoundMemory;
using wire::SegmentType;

// One launch per run that something comes back to.
absl::Status ReturnElements(const BucketLayout& layout, const RoundPlan& plan, std::span<const uint32_t> positions,
                            std::span<const int32_t> integers, std::span<float* const> residual, DeviceBucket* bucket) {
  const size_t bytes = positions.size_bytes();
  GW_ASSIGN_OR_RETURN(const RoundMemory memory, RoundMemory::Make(bucket, 2 * bytes));
  bucket->Upload(memory.data(), positions.data(), bytes);
  bucket->Upload(memory.data() + bytes, integers.data(), bytes);
  const auto* device_positions = reinterpret_cast<const uint32_t*>(memory.data());
  const auto* device_integers = reinterpret_cast<const int32_t*>(memory.data() + bytes);
  for (size_t first = 0, last = 0; first < positions.size(); first = last) {
    const size_t run = RunOf(layout, positions[first]);
    last = static_cast<size_t>(std::lower_bound(positions.begin() + static_cast<ptrdiff_t>(first), positions.end(),
                                                layout.run_begin[run + 1]) -
                               positions.begin());
    // p -= -1 * (integer * unit / 1), each exact but the one addition.
    bucket->backend().SparsePlainStepAsync(residual[run], device_positions + first, device_integers + first,
                                           {last - first, nullptr}, static_cast<uint32_t>(layout.run_begin[run]),
                                           plan.exponents[run], 1, -1.0f, bucket->stream());
  }
  return absl::OkStatus();
}

void ReturnSegment(const BucketLayout& layout, const RoundPlan& plan, const wire::Segment& s,
                   std::span<float* const> residual, DeviceBucket* bucket) {
  const int width = s.type == SegmentType::kDenseF32 ? 4 : s.type == SegmentType::kDenseBf16 ? 2 : s.param;
  kernels::Backend& backend = bucket->backend();
  bucket->Send(s.payload(), [&](const uint8_t* piece, size_t offset, size_t size) {
    const size_t bytes = static_cast<size_t>(width);
    const uint64_t begin = s.begin + offset / bytes;
    ForEachRunPiece(layout, begin, size / bytes, [&](size_t run, uint64_t in_run, uint64_t n, uint64_t at) {
      const uint8_t* values = piece + (at - begin) * bytes;
      float* const out = residual[run] + in_run;
      if (s.type == SegmentType::kDenseF32) {
        backend.Add(out, reinterpret_cast<const float*>(values), n, bucket->stream());
      } else if (s.type == SegmentType::kDenseBf16) {
        backend.AddBf16(values, n, out, bucket->stream());
      } else if (plan.exponents[run] != kUncalibrated) {  // else only zeros were sent
        backend.Dequantize(values, width, n, plan.exponents[run], out, bucket->stream());
      }
    });
  });
}

}  // namespace

absl::Status ReturnOnDevice(const BucketLayout& layout, const EncodedFrame& frame,
                            const std::vector<uint32_t>* positions, std::span<float* const> residual,
                            DeviceBucket* bucket) {
  if (residual.size() != layout.runs.size() || frame.positions.size() != frame.integers.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d: %d residual runs, %d positions, %d integers; the layout has %d runs", layout.bucket,
                        residual.size(), frame.positions.size(), frame.integers.size(), layout.runs.size()));
  }
  if (!frame.positions.empty()) {
    if (positions == nullptr)
      return ReturnElements(layout, frame.plan, frame.positions, frame.integers, residual, bucket);
    std::vector<uint32_t> wanted;
    std::vector<int32_t> integers;
    auto sent = frame.positions.begin();
    for (const uint32_t position : *positions) {
      sent = std::lower_bound(sent, frame.positions.end(), position);
      if (sent == frame.positions.end()) break;
      if (*sent != position) continue;
      wanted.push_back(position);
      integers.push_back(frame.integers[static_cast<size_t>(sent - frame.positions.begin())]);
    }
    return ReturnElements(layout, frame.plan, wanted, integers, residual, bucket);
  }
  if (positions != nullptr) return absl::OkStatus();  // dense frames defer nothing
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
  for (const wire::Chunk& chunk : chunks) {
    for (const wire::Segment& s : chunk.segments) {
      const bool values =
          s.type == SegmentType::kDenseF32 || s.type == SegmentType::kDenseBf16 || s.type == SegmentType::kDenseInt;
      if (values) ReturnSegment(layout, frame.plan, s, residual, bucket);
    }
  }
  return absl::OkStatus();
}

}  // namespace gradwire
