// Segments of positions and values (wire::SegmentType::kSparse): what sparse codecs push, and update frames of them
// hold. Spec: proto/WIRE.md, "Sparse segments".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/value_format.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/wire/frame.h"

namespace gradwire::sparse {

// A reader refuses longer segments.
inline constexpr uint32_t kMaxSegmentElements = 1u << 20;
// The index coding of a segment without an index: its positions are those of the agreement.
inline constexpr uint8_t kAgreedCoding = 15;

// Positions and values of one segment.
using Pairs = Elements;

// Of a segment's param; it may be none.
ValueFormat FormatOf(uint8_t param);

// Where positions may go without saying: random-k's, in one round. density 0: nowhere.
struct Agreement {
  const Job* job = nullptr;
  const BucketLayout* layout = nullptr;
  uint64_t round = 0;
  double density = 0;
};

// How pairs are written.
struct PairForm {
  ValueFormat values = ValueFormat::kFp32;
  IndexForm index = IndexForm::kSmallest;
};

// Writes pairs that cover [begin, begin + count) in one segment or, where that gets long, in several. `values` are
// replaced by what a reader will see.
void WritePairs(std::span<const uint32_t> positions, std::span<float> values, uint64_t begin, uint32_t count,
                const PairForm& form, const Agreement& agreement, wire::FrameWriter* writer);

// Appends the pairs of a segment. Its range must have been checked against the bucket. Errors: InvalidArgument; `out`
// is as it was then.
absl::Status ReadPairs(const wire::Segment& segment, const Agreement& agreement, Pairs* out,
                       const LookAhead& ahead = {});

}  // namespace gradwire::sparse
