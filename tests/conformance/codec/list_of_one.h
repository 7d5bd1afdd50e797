// A list of TAGC's that says one thing.
#pragma once

#include <cstdint>
#include <vector>

#include "common/codec/bits/integer_code.h"
#include "common/wire/frame.h"

namespace gradwire::testing {

// Element 5 of 64. Refers to itself: not copied.
struct ListOfOne {
  explicit ListOfOne(int32_t integer) {
    const CodedIntegers coded = EncodeIntegers({&integer, 1});
    payload.insert(payload.end(), coded.payload.begin(), coded.payload.end());
    segment.type = wire::SegmentType::kList;
    segment.param = static_cast<uint8_t>(4 + 8 * (coded.bits - 1));  // coordinates
    segment.count = 64;
    segment.data = payload.data();
    segment.bytes = static_cast<uint32_t>(payload.size());
  }
  ListOfOne(const ListOfOne&) = delete;

  std::vector<uint8_t> payload = {2, 5, 0};
  wire::Segment segment;
};

}  // namespace gradwire::testing
