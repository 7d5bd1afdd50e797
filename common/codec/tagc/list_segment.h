// Lists: positions and their integers, in pushes and in updates. Spec: proto/WIRE.md, "Frames of the TAGC codec".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/integer_code.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

// In a list of ours: 4 bytes each for position and integer fit a chunk.
inline constexpr uint32_t kMostListed = 1u << 15;

// Writes positions (ascending) and their integers as lists that cover [begin, end).
void AddLists(const TagcShape& shape, std::span<const uint32_t> positions, std::span<const int32_t> integers,
              uint64_t begin, uint64_t end, wire::FrameWriter* writer);

// Appends what a list holds to `positions`; `integers` becomes as long, and what it had behind the end of these is
// overwritten. Never trusts its payload: errors are InvalidArgument, and what was appended is unspecified then. Its
// range must have been checked against the bucket.
absl::Status ReadList(const wire::Segment& list, const LookAhead& ahead, std::vector<uint32_t>* positions,
                      std::vector<int32_t>* integers, IntegerScratch* scratch);

}  // namespace gradwire::tagc
