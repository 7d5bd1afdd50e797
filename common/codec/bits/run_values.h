// A small integer for each run of a bucket (ranges, exponents): a byte each, or the differences between neighbours.
// Spec: proto/WIRE.md, "Values of runs".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace gradwire {

enum class RunCoding : uint8_t {
  kBytes = 0,        // int8 each
  kDifferences = 1,  // u8 k, i8 the first, then zigzag differences to the one before, Rice-coded with the parameter k
};

struct CodedRuns {
  RunCoding coding = RunCoding::kBytes;
  std::vector<uint8_t> payload;
};

// Takes whichever is smaller.
CodedRuns EncodeRuns(std::span<const int8_t> values);

// Replaces *out by `count` values. Never trusts the payload: errors are InvalidArgument (unknown coding, wrong size, a
// value outside int8, bits left over), and leave *out without values.
absl::Status DecodeRuns(RunCoding coding, std::span<const uint8_t> payload, uint32_t count, std::vector<int8_t>* out);

}  // namespace gradwire
