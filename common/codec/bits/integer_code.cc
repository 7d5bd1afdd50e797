// See integer_code.h.
#include "common/codec/bits/integer_code.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/zigzag.h"

namespace gradwire {
namespace {

using kernels::UnZigZag;
using kernels::ZigZag;

constexpr int kMostBits = 32;
constexpr int kLevelBits = 5;                       // of what is left of a code behind its packed bits
constexpr uint32_t kMostLevels = 1u << kLevelBits;  // sets, and one more
constexpr int kCodingBits = 3;                      // of the number before a set; above them its bytes
constexpr char kTooWide[] = "coded integers: one has more than 32 bits";
constexpr uint8_t kEnd = 0;            // the number of an empty set
constexpr uint64_t kMembersOfBit = 4;  // a bit is worth the time that so many take to read
constexpr uint64_t kSetBits = 24;      // about what the number and the head of a set take

// A code is that of zigzag, less the least of all.
uint32_t CodeOf(int32_t v, uint32_t base) { return ZigZag(v) - base; }

struct Span {
  uint32_t base;
  int bits;  // of the widest code
};
GW_CLONES Span SpanOf(std::span<const int32_t> values) {
  uint32_t least = UINT32_MAX;
  uint32_t most = 0;
  for (const int32_t v : values) {
    least = std::min(least, ZigZag(v));
    most = std::max(most, ZigZag(v));
  }
  return {least, std::max(1, static_cast<int>(std::bit_width(most - least)))};
}

GW_CLONES void LowBits(std::span<const int32_t> values, uint32_t base, uint32_t mask, int32_t* out) {
  for (size_t i = 0; i < values.size(); ++i) out[i] = UnZigZag(CodeOf(values[i], base) & mask);
}
// Packs the low bits of codes: batches of integers whose zigzag codes these are.
void PackLowBits(std::span<const int32_t> values, uint32_t base, int bits, uint8_t* out) {
  constexpr size_t kBatch = 1024;  // whole bytes of any bits
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << bits) - 1);
  int32_t low[kBatch];
  for (size_t begin = 0; begin < values.size(); begin += kBatch) {
    const std::span<const int32_t> batch = values.subspan(begin, std::min(kBatch, values.size() - begin));
    LowBits(batch, base, mask, low);
    PackIntegers({low, batch.size()}, bits, out + PackedBytes(begin, bits));
  }
}
// The integer whose zigzag code is larger by 2^bits.
int32_t Further(int32_t v, int bits) {
  const uint32_t sign = static_cast<uint32_t>(v >> 31);
  return static_cast<int32_t>(static_cast<uint32_t>(v) + ((uint32_t{1} << (bits - 1) ^ sign) - sign));
}
// Makes integers of those whose zigzag codes are our codes. Returns the largest code.
GW_CLONES uint32_t FromCodes(uint32_t base, size_t n, int32_t* out) {
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t code = ZigZag(out[i]);
    most = std::max(most, code);
    out[i] = UnZigZag(code + base);
  }
  return most;
}

// Bits that a set of m among n takes, about.
uint64_t SetBits(uint64_t m, uint64_t n) {
  return m == 0 ? 0 : std::min(n, m * (static_cast<uint64_t>(std::bit_width(n / m)) + 1));
}

struct Choice {
  int bits;        // to pack
  size_t members;  // of the first set
};
Choice Choose(std::span<const int32_t> values, const Span& span) {
  const int top = span.bits;
  const int least = std::max(1, top - kLevelBits);
  Choice best = {top, 0};
  if (least >= top) return best;
  // reach[j]: how many codes have j or more behind their `least` lowest bits. Counted in turns, as an addition waits
  // for the one before it where both are of one count.
  std::array<std::array<uint32_t, kMostLevels>, 4> counts{};
  for (size_t i = 0; i < values.size(); ++i) ++counts[i % counts.size()][CodeOf(values[i], span.base) >> least];
  std::array<uint64_t, kMostLevels + 1> reach{};
  for (uint32_t j = kMostLevels; j-- > 0;) {
    reach[j] = reach[j + 1];
    for (const auto& count : counts) reach[j] += count[j];
  }
  uint64_t fewest = values.size() * static_cast<uint64_t>(top);
  for (int bits = least; bits < top; ++bits) {
    const uint32_t step = 1u << (bits - least);
    uint64_t cost = values.size() * static_cast<uint64_t>(bits);
    uint64_t before = values.size();
    for (uint32_t j = step; j < kMostLevels && reach[j] != 0; j += step) {
      cost += SetBits(reach[j], before) + reach[j] / kMembersOfBit + kSetBits;
      before = reach[j];
    }
    if (cost >= fewest) continue;
    fewest = cost;
    best = {bits, reach[step]};
  }
  return best;
}

// What is left of codes behind their packed bits, of a set's members, and which of them are in it. Both have room for
// one more than there are: what comes is written before it is known whether it stays, as no branch could be predicted.
struct Level {
  std::vector<uint32_t> left, ranks;
};
Level FirstLevel(std::span<const int32_t> values, uint32_t base, const Choice& choice) {
  Level level{std::vector<uint32_t>(choice.members + 1), std::vector<uint32_t>(choice.members + 1)};
  size_t n = 0;
  for (uint32_t i = 0; choice.members != 0 && i < values.size(); ++i) {
    const uint32_t left = CodeOf(values[i], base) >> choice.bits;
    level.ranks[n] = i;
    level.left[n] = left;
    n += left != 0 ? 1 : 0;
  }
  return level;
}
// Keeps of n those with at least `least` left; returns how many.
size_t NextLevel(uint32_t least, size_t n, Level* level) {
  size_t kept = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t left = level->left[i];
    level->ranks[kept] = i;
    level->left[kept] = left;
    kept += left >= least ? 1 : 0;
  }
  return kept;
}

}  // namespace

void PutNumber(uint64_t number, std::vector<uint8_t>* out) {
  for (; number >= 0x80; number >>= 7) out->push_back(static_cast<uint8_t>(number | 0x80));
  out->push_back(static_cast<uint8_t>(number));
}

bool TakeNumber(std::span<const uint8_t>* in, uint64_t* number) {
  *number = 0;
  for (size_t i = 0; i < in->size() && i < 5; ++i) {
    *number |= uint64_t{(*in)[i] & 0x7Fu} << (7 * i);
    if ((*in)[i] >= 0x80) continue;
    *in = in->subspan(i + 1);
    return true;
  }
  return false;
}

CodedIntegers EncodeIntegers(std::span<const int32_t> values) {
  const Span span = SpanOf(values);
  CodedIntegers coded;
  const Choice choice = Choose(values, span);
  coded.bits = choice.bits;
  PutNumber(span.base, &coded.payload);
  const size_t head = coded.payload.size();
  coded.payload.resize(head + PackedBytes(values.size(), coded.bits));
  PackLowBits(values, span.base, coded.bits, coded.payload.data() + head);

  Level level = FirstLevel(values, span.base, choice);
  size_t before = values.size();
  size_t n = choice.members;
  for (uint32_t least = 2; n != 0; ++least) {
    const CodedIndex set = EncodeIndex(std::span(level.ranks).first(n), 0, static_cast<uint32_t>(before));
    PutNumber(uint64_t{set.payload.size()} << kCodingBits | static_cast<uint64_t>(set.coding), &coded.payload);
    coded.payload.insert(coded.payload.end(), set.payload.begin(), set.payload.end());
    before = n;
    n = NextLevel(least, n, &level);
  }
  coded.payload.push_back(kEnd);
  return coded;
}

bool MayHoldIntegers(std::span<const uint8_t> payload, int bits, size_t n) {
  constexpr size_t kNumbers = 2;  // the least code, and the end of the sets
  return bits >= 1 && bits <= kMostBits && payload.size() >= kNumbers + PackedBytes(n, bits);
}

absl::Status DecodeIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out) {
  IntegerScratch scratch;
  return DecodeIntegers(payload, bits, n, out, &scratch);
}

absl::Status DecodeIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out,
                            IntegerScratch* scratch) {
  const size_t bytes = payload.size();
  uint64_t base = 0;
  if (!MayHoldIntegers(payload, bits, n) || !TakeNumber(&payload, &base) || payload.size() < PackedBytes(n, bits)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d coded integers of %d bits and more in %d bytes", n, bits, bytes));
  }
  GW_RETURN_IF_ERROR(UnpackIntegers(payload.first(PackedBytes(n, bits)), bits, n, out));
  payload = payload.subspan(PackedBytes(n, bits));
  auto& [members, ranks] = *scratch;
  uint64_t held = 0;  // by all sets
  uint32_t before = static_cast<uint32_t>(n);
  for (uint32_t level = 1;; ++level) {
    uint64_t number = 0;
    ranks.clear();
    if (!TakeNumber(&payload, &number) || number >> kCodingBits > payload.size() ||
        (number == kEnd ? !payload.empty() : level == kMostLevels))
      return absl::InvalidArgumentError(
          absl::StrFormat("coded integers: set %d is cut short, or one too many, or bytes follow the last", level));
    if (number == kEnd) break;
    const std::span<const uint8_t> set = payload.first(number >> kCodingBits);
    payload = payload.subspan(set.size());
    GW_RETURN_IF_ERROR(
        DecodeIndex(static_cast<IndexCoding>(number & ((1u << kCodingBits) - 1)), set, 0, before, &ranks));
    held += ranks.size();
    if (ranks.empty() || held > kLevelBits * uint64_t{n}) {
      return absl::InvalidArgumentError(
          absl::StrFormat("coded integers: set %d has %d of %d", level, ranks.size(), before));
    }
    if (level == 1) {
      members.swap(ranks);
    } else {
      for (size_t i = 0; i < ranks.size(); ++i) members[i] = members[ranks[i]];
      members.resize(ranks.size());
    }
    before = static_cast<uint32_t>(members.size());
    if (uint64_t{level + 1} << bits > uint64_t{1} << 32) return absl::InvalidArgumentError(kTooWide);
    for (const uint32_t i : members) out[i] = Further(out[i], bits);
  }
  if (FromCodes(static_cast<uint32_t>(base), n, out) + base > UINT32_MAX) return absl::InvalidArgumentError(kTooWide);
  return absl::OkStatus();
}

}  // namespace gradwire
