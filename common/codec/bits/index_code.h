// Coding of sets of element positions: bitmap, Golomb-Rice gaps of positions or of stretches of them, coordinates or
// nothing at all, whichever is smallest. Spec: proto/WIRE.md, "Index codes".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/job/codec_spec.h"

namespace gradwire {

enum class IndexCoding : uint8_t {
  kEmpty = 0,   // no position; no payload
  kFull = 1,    // every position; no payload
  kBitmap = 2,  // ceil(count / 8) bytes, bit i of byte i/8 = position begin + i
  kRice = 3,    // u32 n, u8 k, then n gaps (difference to the previous position minus 1), unary quotient, k-bit rest
  kCoordinates = 4,      // position - begin each: u16 where count is at most 65536, else u32
  kWideCoordinates = 5,  // position - begin each: u32; ZEN's COO
  // u32 n stretches of positions that follow each other, as those of rows do, u8 k, u8 w, u32 least length; then for
  // each its gap (elements since the one before it, minus 1), coded as by kRice, and w bits of its length minus the
  // least
  kStretches = 6,
};

// Which of them a writer takes. kSmallest: whatever is smallest. kCoordinates: 32-bit coordinates. kBitmap: a bitmap.
// kAuto: the smaller of these two. No position is always kEmpty.
using IndexForm = SparseSpec::Index;

struct CodedIndex {
  IndexCoding coding = IndexCoding::kEmpty;
  std::vector<uint8_t> payload;
};

// Codes `positions` (ascending, unique, all in [begin, begin + count)).
CodedIndex EncodeIndex(std::span<const uint32_t> positions, uint32_t begin, uint32_t count,
                       IndexForm form = IndexForm::kSmallest);

// Where what lies at a position will be looked at: it is fetched while later positions are decoded (of kRice alone,
// whose positions lie far from each other). By default nothing.
struct LookAhead {
  const void* memory = nullptr;
  size_t stride = 0;  // bytes per position; 0: nothing is fetched
};

// Appends the positions to `out`. Never trusts the payload: errors are InvalidArgument (unknown coding, wrong size,
// position outside, not ascending, bits left over).
absl::Status DecodeIndex(IndexCoding coding, std::span<const uint8_t> payload, uint32_t begin, uint32_t count,
                         std::vector<uint32_t>* out, const LookAhead& ahead = {});

// Bit-packing of zigzag integers, `bits` (1 to 32) each, little-endian bit order, padded to a byte.
int BitsFor(std::span<const int32_t> values);  // smallest `bits` that holds all of them, at least 1
size_t PackedBytes(size_t n, int bits);        // ceil(n * bits / 8)
void PackIntegers(std::span<const int32_t> values, int bits, uint8_t* out);  // fills PackedBytes
std::vector<uint8_t> PackIntegers(std::span<const int32_t> values, int bits);
// Errors: InvalidArgument for a size other than ceil(n * bits / 8) or bits outside 1..32.
absl::Status UnpackIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out);

}  // namespace gradwire
