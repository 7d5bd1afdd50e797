// Segments that hold whole runs, one behind the other, each in as many bytes as its length asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/run_pieces.h"
#include "common/job/layout.h"
#include "common/wire/frame.h"

namespace gradwire {

// Borrows the layout; immutable. `BytesOf`: size_t(size_t n), the bytes of a run with n elements.
template <typename BytesOf>
class RunSegments {
 public:
  static constexpr uint32_t kMostElements = 65536;  // of a segment

  RunSegments(const BucketLayout* layout, BytesOf bytes_of) : layout_(*layout), bytes_of_(bytes_of) {}

  size_t BytesOfRun(size_t run) const { return bytes_of_(layout_.runs[run].length); }

  // Calls fn(first, last, header) for the segments that a frame is written in: runs [first, last).
  template <typename Fn>
  void ForEachSegment(wire::SegmentType type, uint8_t param, Fn fn) const {
    for (size_t first = 0, last = 0; first < layout_.runs.size(); first = last) {
      size_t bytes = 0;
      uint32_t count = 0;
      do {
        bytes += BytesOfRun(last);
        count += layout_.runs[last].length;
        ++last;
      } while (last < layout_.runs.size() && bytes + BytesOfRun(last) <= kSegmentBytes &&
               count + layout_.runs[last].length <= kMostElements);
      fn(first, last, wire::SegmentHeader{type, param, layout_.run_begin[first], count, static_cast<uint32_t>(bytes)});
    }
  }

  // What the runs that [begin, begin + count) consists of take; nothing where these are not whole runs.
  std::optional<uint64_t> BytesOfRuns(uint64_t begin, uint64_t count) const {
    if (begin > layout_.elements || count > layout_.elements - begin || count == 0 || count > kMostElements) {
      return std::nullopt;
    }
    size_t run = RunOf(layout_, begin);
    if (layout_.run_begin[run] != begin) return std::nullopt;
    uint64_t bytes = 0;
    for (; layout_.run_begin[run] < begin + count; ++run) bytes += BytesOfRun(run);
    return layout_.run_begin[run] == begin + count ? std::optional(bytes) : std::nullopt;
  }

  // Calls fn(run, its bytes) for every run of a segment whose size BytesOfRuns has confirmed. Stops at the first error.
  template <typename Fn>
  absl::Status ForEachRun(const wire::Segment& s, Fn fn) const {
    const uint8_t* at = s.data;
    for (size_t run = RunOf(layout_, s.begin); layout_.run_begin[run] < s.begin + s.count; ++run) {
      GW_RETURN_IF_ERROR(fn(run, at));
      at += BytesOfRun(run);
    }
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kSegmentBytes = 128u << 10;  // of payload, that a writer closes a segment before

  const BucketLayout& layout_;
  const BytesOf bytes_of_;
};

}  // namespace gradwire
