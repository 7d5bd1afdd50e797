// Index codes: see index_code.h and proto/WIRE.md, "Index codes".
#include "common/codec/bits/index_code.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/bit_io.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/zigzag.h"

namespace gradwire {
namespace {

constexpr size_t kRiceHeaderBytes = 5;  // u32 n, u8 k
constexpr int kMaxRiceBits = 31;

// Of the same gaps with three parameters, one after the other.
struct RiceCosts {
  uint64_t bits[3];
};

// Bits of the gaps coded with the parameters k to k + 2 (Golomb 1966; Rice 1979): quotient in unary, a one bit, k bits
// of rest. The gaps add up to less than 2^32, as they lie between positions, and so do their quotients.
GW_CLONES RiceCosts RiceBits(std::span<const uint32_t> positions, uint32_t begin, int k) {
  const uint32_t* const p = positions.data();
  const size_t n = positions.size();
  const uint32_t first = p[0] - begin;
  uint32_t quotients[3] = {first >> k, first >> (k + 1), first >> (k + 2)};
  for (size_t i = 1; i < n; ++i) {
    const uint32_t gap = p[i] - p[i - 1] - 1;
    quotients[0] += gap >> k;
    quotients[1] += gap >> (k + 1);
    quotients[2] += gap >> (k + 2);
  }
  RiceCosts costs;
  for (int j = 0; j < 3; ++j) costs.bits[j] = n * static_cast<uint64_t>(k + j + 1) + quotients[j];
  return costs;
}

// The parameter of the fewest bits. For geometric gaps of mean m it lies next to log2(m ln 2).
int BestRiceParameter(std::span<const uint32_t> positions, uint32_t begin, uint64_t* bits) {
  const uint64_t mean = (positions.back() - begin) / positions.size();
  const int guess = std::bit_width(mean) - 1;
  const int least = std::clamp(guess - 1, 0, kMaxRiceBits - 2);
  const int last = std::min(kMaxRiceBits, guess + 1);
  const RiceCosts costs = RiceBits(positions, begin, least);
  int best = 0;
  *bits = UINT64_MAX;
  for (int k = std::max(0, guess - 1); k <= last; ++k) {
    if (costs.bits[k - least] >= *bits) continue;
    *bits = costs.bits[k - least];
    best = k;
  }
  return best;
}

inline __attribute__((always_inline)) void PutGap(uint32_t gap, int k, BitWriter* writer) {
  writer->Zeros(gap >> k);
  writer->Put(1, 1);
  writer->Put(gap & ((uint32_t{1} << k) - 1), k);
}

constexpr size_t kRiceBatch = 256;  // gaps whose codes are computed before they are written

// Codes of gaps, those of two neighbours behind each other. What is longer than 64 bits has a length above 64 (not the
// true one) and bits of no meaning.
struct RiceCodes {
  uint64_t bits[kRiceBatch / 2];
  uint64_t lengths[kRiceBatch / 2];
};

// The codes of the n gaps (an even number, at most kRiceBatch) that end at `positions`; the first one begins behind
// positions[-1]. Two plain loops, which the compiler vectorises.
inline __attribute__((always_inline)) void CodeGaps(const uint32_t* positions, size_t n, int k, RiceCodes* out) {
  uint64_t bits[kRiceBatch];
  uint64_t lengths[kRiceBatch];
  const uint32_t mask = (uint32_t{1} << k) - 1;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t gap = positions[i] - positions[static_cast<ptrdiff_t>(i) - 1] - 1;
    const uint64_t quotient = std::min(gap >> k, 63u);
    bits[i] = (uint64_t{gap & mask} << 1 | 1) << quotient;
    lengths[i] = quotient + 1 + static_cast<uint64_t>(k);
  }
  for (size_t i = 0; i < n / 2; ++i) {
    out->bits[i] = bits[2 * i] | bits[2 * i + 1] << (lengths[2 * i] & 63);
    out->lengths[i] = lengths[2 * i] + lengths[2 * i + 1];
  }
}

// Four gaps at a time: their codes are independent of each other, only where they are written is not.
GW_CLONES std::vector<uint8_t> EncodeRice(std::span<const uint32_t> positions, uint32_t begin, int k, uint64_t bits) {
  std::vector<uint8_t> out(kRiceHeaderBytes + (bits + 7) / 8 + BitWriter::kSlackBytes);
  const uint32_t n = static_cast<uint32_t>(positions.size());
  std::memcpy(out.data(), &n, 4);
  out[4] = static_cast<uint8_t>(k);
  BitWriter writer(out.data() + kRiceHeaderBytes);
  PutGap(positions[0] - begin, k, &writer);
  size_t i = 1;
  RiceCodes codes;
  while (i + 4 <= n) {
    const size_t batch = std::min(kRiceBatch, (n - i) / 4 * 4);
    const uint32_t* const p = positions.data() + i;
    CodeGaps(p, batch, k, &codes);
    for (size_t j = 0; j < batch; j += 4) {
      const uint64_t first = codes.lengths[j / 2];
      const uint64_t length = first + codes.lengths[j / 2 + 1];
      if (length <= BitWriter::kMaxBits) {
        writer.PutLong(codes.bits[j / 2] | codes.bits[j / 2 + 1] << first, static_cast<int>(length));
      } else {
        for (size_t g = j; g < j + 4; ++g) PutGap(p[g] - positions[i + g - 1] - 1, k, &writer);
      }
    }
    i += batch;
  }
  for (; i < n; ++i) PutGap(positions[i] - positions[i - 1] - 1, k, &writer);
  writer.Flush();
  out.resize(out.size() - BitWriter::kSlackBytes);
  return out;
}

// Decodes gaps as long as whole words of input are left: several from each word, since a gap's code begins where the
// one before it ends and that is all they have to wait for. Returns how many were decoded and moves `*position` (of the
// bit stream) and `*next` (the least position that may follow); stops before what it cannot judge.
template <bool kFetch>
inline __attribute__((always_inline)) uint32_t DecodeWords(std::span<const uint8_t> stream, int k, uint32_t n,
                                                           uint64_t end, const LookAhead& ahead, uint64_t* position,
                                                           uint64_t* next, uint32_t* positions) {
  const char* const memory = static_cast<const char*>(ahead.memory);
  const size_t stride = ahead.stride;
  constexpr uint32_t kWindowBits = 57;
  const uint64_t mask = (uint64_t{1} << k) - 1;
  uint64_t at = *position;
  uint64_t from = *next;
  uint32_t i = 0;
  while (i < n && (at >> 3) + 8 <= stream.size()) {
    uint64_t word;
    std::memcpy(&word, stream.data() + (at >> 3), 8);
    word >>= at & 7;
    uint32_t used = 0;
    uint32_t decoded = i;
    for (; decoded < n; ++decoded) {
      const uint32_t quotient = static_cast<uint32_t>(std::countr_zero(word | uint64_t{1} << 63));
      const uint32_t length = quotient + 1 + static_cast<uint32_t>(k);
      if (used + length > kWindowBits) break;
      const uint64_t p = from + (uint64_t{quotient} << k) + (word >> (quotient + 1) & mask);
      if (p >= end) break;
      if constexpr (kFetch) __builtin_prefetch(memory + p * stride, 1);
      positions[decoded] = static_cast<uint32_t>(p);
      from = p + 1;
      word >>= length;
      used += length;
    }
    if (decoded == i) break;
    at += used;
    i = decoded;
  }
  *position = at;
  *next = from;
  return i;
}

GW_CLONES uint32_t DecodeRiceWords(std::span<const uint8_t> stream, int k, uint32_t n, uint64_t end,
                                   const LookAhead& ahead, uint64_t* position, uint64_t* next, uint32_t* positions) {
  return DecodeWords<false>(stream, k, n, end, ahead, position, next, positions);
}
GW_CLONES uint32_t DecodeAndFetch(std::span<const uint8_t> stream, int k, uint32_t n, uint64_t end,
                                  const LookAhead& ahead, uint64_t* position, uint64_t* next, uint32_t* positions) {
  return DecodeWords<true>(stream, k, n, end, ahead, position, next, positions);
}

absl::Status DecodeRice(std::span<const uint8_t> payload, uint32_t begin, uint32_t count, const LookAhead& ahead,
                        std::vector<uint32_t>* out) {
  if (payload.size() < kRiceHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("Rice index of %d bytes", payload.size()));
  }
  uint32_t n = 0;
  std::memcpy(&n, payload.data(), 4);
  const int k = payload[4];
  if (n == 0 || n > count || k > kMaxRiceBits || n > (payload.size() - kRiceHeaderBytes) * 8) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "Rice index of %d positions with parameter %d in %d bytes, for %d elements", n, k, payload.size(), count));
  }
  const std::span<const uint8_t> stream = payload.subspan(kRiceHeaderBytes);
  const size_t before = out->size();
  out->resize(before + n);
  uint32_t* positions = out->data() + before;
  uint64_t next = begin;
  uint64_t position = 0;
  const uint64_t end = uint64_t{begin} + count;
  uint32_t i = 0;
  for (;;) {
    i += (ahead.stride == 0 ? DecodeRiceWords : DecodeAndFetch)(stream, k, n - i, end, ahead, &position, &next,
                                                                positions + i);
    BitReader reader(stream, position);
    if (i == n) {
      if (reader.AtPaddedEnd()) return absl::OkStatus();
      out->resize(before);
      return absl::InvalidArgumentError(absl::StrFormat("Rice index: bits are left over behind %d positions", n));
    }
    const uint64_t quotient = reader.TakeUnary();
    const uint64_t p = next + (quotient << k) + reader.Take(k);
    if (quotient > count || p >= end || reader.overrun()) {
      out->resize(before);
      return absl::InvalidArgumentError(
          absl::StrFormat("Rice index: position %d of %d is not within [%d, %d)", i, n, begin, end));
    }
    positions[i++] = static_cast<uint32_t>(p);
    next = p + 1;
    position = reader.position();
  }
}

// ---- Stretches of positions that follow each other ----

constexpr size_t kStretchesHeaderBytes = 10;  // u32 n, u8 k, u8 w, u32 least length
constexpr int kMaxLengthBits = 32;

GW_CLONES size_t CountStretches(std::span<const uint32_t> positions) {
  const uint32_t* const p = positions.data();
  uint32_t n = 1;
  for (size_t i = 1; i < positions.size(); ++i) n += p[i] - p[i - 1] != 1 ? 1 : 0;
  return n;
}

// `starts` are first positions without all positions before them, so that they are coded as single positions are: what
// lies between them, but one element, are the gaps.
struct Stretches {
  std::vector<uint32_t> starts, lengths;
  uint32_t least = 0;
  int k = 0, width = 0;
  uint64_t bytes = 0;
};

Stretches StretchesOf(std::span<const uint32_t> positions, uint32_t begin, size_t n) {
  Stretches found;
  found.starts.reserve(n);
  found.lengths.reserve(n);
  uint32_t before = 0;  // positions
  for (size_t first = 0, last = 0; first < positions.size(); first = last) {
    for (last = first + 1; last < positions.size() && positions[last] - positions[last - 1] == 1;) ++last;
    const uint32_t length = static_cast<uint32_t>(last - first);
    found.starts.push_back(positions[first] - before);
    found.lengths.push_back(length);
    before += length;
  }
  const auto [least, most] = std::minmax_element(found.lengths.begin(), found.lengths.end());
  found.least = *least;
  found.width = std::bit_width(*most - *least);
  uint64_t bits = 0;
  found.k = BestRiceParameter(found.starts, begin, &bits);
  found.bytes = kStretchesHeaderBytes + (bits + n * static_cast<uint64_t>(found.width) + 7) / 8;
  return found;
}

std::vector<uint8_t> EncodeStretches(const Stretches& stretches, uint32_t begin) {
  std::vector<uint8_t> out(stretches.bytes);
  const uint32_t n = static_cast<uint32_t>(stretches.starts.size());
  std::memcpy(out.data(), &n, 4);
  out[4] = static_cast<uint8_t>(stretches.k);
  out[5] = static_cast<uint8_t>(stretches.width);
  std::memcpy(out.data() + 6, &stretches.least, 4);
  BitWriter writer(out.data() + kStretchesHeaderBytes);
  uint32_t next = begin;
  for (uint32_t i = 0; i < n; ++i) {
    PutGap(stretches.starts[i] - next, stretches.k, &writer);
    writer.Put(stretches.lengths[i] - stretches.least, stretches.width);
    next = stretches.starts[i] + 1;
  }
  writer.Flush();
  return out;
}

absl::Status DecodeStretches(std::span<const uint8_t> payload, uint32_t begin, uint32_t count,
                             std::vector<uint32_t>* out) {
  if (payload.size() < kStretchesHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("index of stretches in %d bytes", payload.size()));
  }
  uint32_t n = 0, least = 0;
  std::memcpy(&n, payload.data(), 4);
  std::memcpy(&least, payload.data() + 6, 4);
  const int k = payload[4];
  const int width = payload[5];
  const std::span<const uint8_t> stream = payload.subspan(kStretchesHeaderBytes);
  if (n == 0 || n > count || k > kMaxRiceBits || width > kMaxLengthBits || least == 0 || n > stream.size() * 8) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "index of %d stretches with parameters %d and %d, of %d positions or more, in %d bytes, for %d elements", n, k,
        width, least, payload.size(), count));
  }
  const size_t before = out->size();
  const auto refuse = [&](absl::Status why) {
    out->resize(before);
    return why;
  };
  BitReader reader(stream);
  const uint64_t end = uint64_t{begin} + count;
  uint64_t next = begin;
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t quotient = reader.TakeUnary();
    const uint64_t first = next + (quotient << k) + reader.Take(k);
    const uint64_t last = first + least + reader.Take(width);
    if (quotient > count || last > end || reader.overrun()) {
      return refuse(absl::InvalidArgumentError(
          absl::StrFormat("index of stretches: stretch %d of %d is not within [%d, %d)", i, n, begin, end)));
    }
    const size_t at = out->size();
    out->resize(at + (last - first));
    std::iota(out->begin() + static_cast<ptrdiff_t>(at), out->end(), static_cast<uint32_t>(first));
    next = last + 1;
  }
  if (reader.AtPaddedEnd()) return absl::OkStatus();
  return refuse(
      absl::InvalidArgumentError(absl::StrFormat("index of stretches: bits are left over behind %d stretches", n)));
}

std::vector<uint8_t> EncodeBitmap(std::span<const uint32_t> positions, uint32_t begin, uint32_t count) {
  std::vector<uint8_t> out((uint64_t{count} + 7) / 8);
  for (uint32_t p : positions) {
    const uint32_t i = p - begin;
    out[i / 8] = static_cast<uint8_t>(out[i / 8] | (1u << (i % 8)));
  }
  return out;
}

absl::Status DecodeBitmap(std::span<const uint8_t> payload, uint32_t begin, uint32_t count,
                          std::vector<uint32_t>* out) {
  if (payload.size() != (uint64_t{count} + 7) / 8) {
    return absl::InvalidArgumentError(absl::StrFormat("bitmap of %d bytes for %d elements", payload.size(), count));
  }
  if (count % 8 != 0 && (payload.back() >> (count % 8)) != 0) {
    return absl::InvalidArgumentError("bitmap has bits behind its last element");
  }
  const auto word_at = [&](size_t byte) {
    uint64_t word = 0;
    std::memcpy(&word, payload.data() + byte, std::min<size_t>(8, payload.size() - byte));
    return word;
  };
  size_t n = 0;
  for (size_t byte = 0; byte < payload.size(); byte += 8) n += static_cast<size_t>(std::popcount(word_at(byte)));
  const size_t before = out->size();
  out->resize(before + n);
  uint32_t* next = out->data() + before;
  for (size_t byte = 0; byte < payload.size(); byte += 8) {
    const uint32_t first = begin + static_cast<uint32_t>(byte * 8);
    for (uint64_t word = word_at(byte); word != 0; word &= word - 1)
      *next++ = first + static_cast<uint32_t>(std::countr_zero(word));
  }
  return absl::OkStatus();
}

constexpr size_t kWideCoordinateBytes = 4;
size_t CoordinateBytes(uint32_t count) { return count <= 65536 ? 2 : kWideCoordinateBytes; }

std::vector<uint8_t> EncodeCoordinates(std::span<const uint32_t> positions, uint32_t begin, size_t width) {
  std::vector<uint8_t> out(positions.size() * width);
  for (size_t i = 0; i < positions.size(); ++i) {
    const uint32_t coordinate = positions[i] - begin;  // little-endian: the lower bytes come first
    std::memcpy(out.data() + i * width, &coordinate, width);
  }
  return out;
}

absl::Status DecodeCoordinates(std::span<const uint8_t> payload, uint32_t begin, uint32_t count, size_t width,
                               std::vector<uint32_t>* out) {
  const size_t before = out->size();
  if (payload.empty() || payload.size() % width != 0) {
    return absl::InvalidArgumentError(absl::StrFormat("coordinates of %d bytes each in %d", width, payload.size()));
  }
  for (size_t at = 0; at < payload.size(); at += width) {
    uint32_t coordinate = 0;
    std::memcpy(&coordinate, payload.data() + at, width);
    if (coordinate >= count || (out->size() > before && begin + coordinate <= out->back())) {
      out->resize(before);
      return absl::InvalidArgumentError(
          absl::StrFormat("coordinate %d of %d elements is outside or not ascending", coordinate, count));
    }
    out->push_back(begin + coordinate);
  }
  return absl::OkStatus();
}

// Eight codes at a time, which are whole bytes; returns how many.
GW_CLONES size_t PackNarrow(std::span<const int32_t> values, int bits, uint8_t* out) {
  size_t i = 0;
  for (; i + 8 <= values.size(); i += 8) {
    uint32_t codes = 0;
    for (size_t j = 0; j < 8; ++j) codes |= kernels::ZigZag(values[i + j]) << (j * static_cast<size_t>(bits));
    for (int byte = 0; byte < bits; ++byte) *out++ = static_cast<uint8_t>(codes >> (8 * byte));
  }
  return i;
}

}  // namespace

CodedIndex EncodeIndex(std::span<const uint32_t> positions, uint32_t begin, uint32_t count, IndexForm form) {
  if (positions.empty()) return {IndexCoding::kEmpty, {}};
  if (form != IndexForm::kSmallest) {
    // ZEN (arXiv 2309.13254): 32 bits per non-zero against one per element.
    const bool sparse = uint64_t{32} * positions.size() <= count;
    if (form == IndexForm::kBitmap || (form == IndexForm::kAuto && !sparse))
      return {IndexCoding::kBitmap, EncodeBitmap(positions, begin, count)};
    return {IndexCoding::kWideCoordinates, EncodeCoordinates(positions, begin, kWideCoordinateBytes)};
  }
  if (positions.size() == count) return {IndexCoding::kFull, {}};
  uint64_t bits = 0;
  const int k = BestRiceParameter(positions, begin, &bits);
  const uint64_t rice = kRiceHeaderBytes + (bits + 7) / 8;
  const uint64_t bitmap = (uint64_t{count} + 7) / 8;
  const uint64_t coordinates = positions.size() * CoordinateBytes(count);
  // Few positions each save little, and where most positions are there a bitmap takes little beside their values.
  const bool most = positions.size() > count / 2;
  if (const size_t n = most ? positions.size() : CountStretches(positions); 4 * n <= 3 * positions.size()) {
    const Stretches stretches = StretchesOf(positions, begin, n);
    if (stretches.bytes < std::min({rice, bitmap, coordinates}))
      return {IndexCoding::kStretches, EncodeStretches(stretches, begin)};
  }
  if (coordinates < std::min(rice, bitmap))
    return {IndexCoding::kCoordinates, EncodeCoordinates(positions, begin, CoordinateBytes(count))};
  if (rice < bitmap) return {IndexCoding::kRice, EncodeRice(positions, begin, k, bits)};
  return {IndexCoding::kBitmap, EncodeBitmap(positions, begin, count)};
}

absl::Status DecodeIndex(IndexCoding coding, std::span<const uint8_t> payload, uint32_t begin, uint32_t count,
                         std::vector<uint32_t>* out, const LookAhead& ahead) {
  if (uint64_t{begin} + count > (uint64_t{1} << 32)) {
    return absl::InvalidArgumentError(absl::StrFormat("index of [%d, %d + %d) is past 2^32", begin, begin, count));
  }
  switch (coding) {
    case IndexCoding::kEmpty:
    case IndexCoding::kFull:
      if (!payload.empty()) return absl::InvalidArgumentError("an empty or full index has no payload");
      if (coding == IndexCoding::kFull) {
        for (uint32_t i = 0; i < count; ++i) out->push_back(begin + i);
      }
      return absl::OkStatus();
    case IndexCoding::kBitmap:
      return DecodeBitmap(payload, begin, count, out);
    case IndexCoding::kRice:
      return DecodeRice(payload, begin, count, ahead, out);
    case IndexCoding::kCoordinates:
      return DecodeCoordinates(payload, begin, count, CoordinateBytes(count), out);
    case IndexCoding::kWideCoordinates:
      return DecodeCoordinates(payload, begin, count, kWideCoordinateBytes, out);
    case IndexCoding::kStretches:
      return DecodeStretches(payload, begin, count, out);
  }
  return absl::InvalidArgumentError(absl::StrFormat("unknown index coding %d", static_cast<int>(coding)));
}

GW_CLONES int BitsFor(std::span<const int32_t> values) {
  uint32_t all = 1;
  for (int32_t v : values) all |= kernels::ZigZag(v);
  return std::bit_width(all);
}

size_t PackedBytes(size_t n, int bits) { return (n * static_cast<size_t>(bits) + 7) / 8; }

void PackIntegers(std::span<const int32_t> values, int bits, uint8_t* out) {
  size_t done = 0;
  if (bits < kernels::kLeastPackedBits) {
    done = PackNarrow(values, bits, out);
  } else if (bits <= kernels::kMostPackedBits) {
    done = kernels::PackZigZag(values, bits, {out, PackedBytes(values.size(), bits)});
  }
  BitWriter writer(out + PackedBytes(done, bits));  // so far whole bytes were filled
  for (; done < values.size(); ++done) writer.Put(kernels::ZigZag(values[done]), bits);
  writer.Flush();
}

std::vector<uint8_t> PackIntegers(std::span<const int32_t> values, int bits) {
  std::vector<uint8_t> out(PackedBytes(values.size(), bits));
  PackIntegers(values, bits, out.data());
  return out;
}

absl::Status UnpackIntegers(std::span<const uint8_t> payload, int bits, size_t n, int32_t* out) {
  if (bits < 1 || bits > 32 || payload.size() != PackedBytes(n, bits)) {
    return absl::InvalidArgumentError(absl::StrFormat("%d integers of %d bits in %d bytes", n, bits, payload.size()));
  }
  size_t done = 0;
  if (bits <= kernels::kMostPackedBits) done = kernels::UnpackZigZag(payload, bits, n, out);
  BitReader reader(payload, done * static_cast<size_t>(bits));
  for (; done < n; ++done) out[done] = kernels::UnZigZag(reader.Take(bits));
  if (!reader.AtPaddedEnd()) return absl::InvalidArgumentError("packed integers: padding is not zero");
  return absl::OkStatus();
}

}  // namespace gradwire
