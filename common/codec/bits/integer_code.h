// Coding of integers of which most are near the least magnitude: what they are more than that, its low bits packed,
// then nested sets for what is larger. Spec: proto/WIRE.md, "Coded integers".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace gradwire {

struct CodedIntegers {
  int bits = 1;  // 1 to 32 low bits of each code that are packed
  std::vector<uint8_t> payload;
};

// The bits are those that promise the fewest bytes, or hardly more and less work. Precondition: not empty.
CodedIntegers EncodeIntegers(std::span<const int32_t> values);
// Whether a payload is long enough for n integers: to be asked before room is made for them.
bool MayHoldIntegers(std::span<const uint8_t> payload, int bits, size_t n);
// What decoding needs beside the integers, kept from call to call.
struct IntegerScratch {
  std::vector<uint32_t> members, ranks;
};
// Fills n integers. Never trusts the payload: errors are InvalidArgument (bits outside 1..32, too short, too many sets
// or members, a set that is empty or damaged, bytes left over, an integer past 32 bits); `out` is unspecified then.
absl::Status DecodeIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out,
                            IntegerScratch* scratch);
absl::Status DecodeIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out);

// A number is 7 bits to a byte, the lowest first, each byte but the last plus 128.
void PutNumber(uint64_t number, std::vector<uint8_t>* out);
// Takes one off the front of `in`. False: there is none there, or one of more than 35 bits.
bool TakeNumber(std::span<const uint8_t>* in, uint64_t* number);

}  // namespace gradwire
