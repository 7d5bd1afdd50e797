// Values of runs; see run_values.h.
#include "common/codec/bits/run_values.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/codec/bits/bit_io.h"

namespace gradwire {
namespace {

constexpr size_t kRunHeaderBytes = 2;  // the Rice parameter and the first value
constexpr int kMostRiceBits = 9;       // of zigzag differences, which are at most 510

uint32_t Zigzag(int difference) {
  return static_cast<uint32_t>(difference >= 0 ? 2 * difference : -2 * difference - 1);
}
int FromZigzag(uint32_t code) { return static_cast<int>(code >> 1) ^ -static_cast<int>(code & 1); }

uint64_t BitsOfDifferences(std::span<const int8_t> values, int k) {
  uint64_t bits = 0;
  for (size_t i = 1; i < values.size(); ++i)
    bits += (Zigzag(values[i] - values[i - 1]) >> k) + 1 + static_cast<uint64_t>(k);
  return bits;
}

}  // namespace

CodedRuns EncodeRuns(std::span<const int8_t> values) {
  CodedRuns coded;
  int best = 0;
  uint64_t bits = UINT64_MAX;
  for (int k = 0; k <= kMostRiceBits; ++k) {  // the bits are convex in k
    const uint64_t with_k = BitsOfDifferences(values, k);
    if (with_k >= bits) break;
    bits = with_k;
    best = k;
  }
  if (values.size() <= kRunHeaderBytes + (bits + 7) / 8) {
    coded.payload.assign(values.begin(), values.end());
    return coded;
  }
  coded.coding = RunCoding::kDifferences;
  coded.payload.resize(kRunHeaderBytes + (bits + 7) / 8);
  coded.payload[0] = static_cast<uint8_t>(best);
  coded.payload[1] = static_cast<uint8_t>(values[0]);
  BitWriter writer(coded.payload.data() + kRunHeaderBytes);
  for (size_t i = 1; i < values.size(); ++i) {
    const uint32_t code = Zigzag(values[i] - values[i - 1]);
    writer.Zeros(code >> best);
    writer.Put(1, 1);
    writer.Put(code & ((1u << best) - 1), best);
  }
  writer.Flush();
  return coded;
}

absl::Status DecodeRuns(RunCoding coding, std::span<const uint8_t> payload, uint32_t count, std::vector<int8_t>* out) {
  out->clear();
  if (coding == RunCoding::kBytes) {
    if (payload.size() != count)
      return absl::InvalidArgumentError(absl::StrFormat("values of %d runs in %d bytes", count, payload.size()));
    out->assign(payload.begin(), payload.end());
    return absl::OkStatus();
  }
  if (coding != RunCoding::kDifferences)
    return absl::InvalidArgumentError(
        absl::StrFormat("values of runs in coding %d, which is not known", static_cast<int>(coding)));
  // A difference takes a bit or more: no more memory than the payload is worth.
  if (count == 0 || payload.size() < kRunHeaderBytes || payload[0] > kMostRiceBits ||
      count - 1 > (payload.size() - kRunHeaderBytes) * 8)
    return absl::InvalidArgumentError(
        absl::StrFormat("differences between %d runs in %d bytes", count, payload.size()));
  const int k = payload[0];
  int value = static_cast<int8_t>(payload[1]);
  out->resize(count);
  (*out)[0] = static_cast<int8_t>(value);
  BitReader reader(payload.subspan(kRunHeaderBytes));
  for (uint32_t i = 1; i < count; ++i) {
    const uint64_t quotient = reader.TakeUnary();
    const uint32_t rest = reader.Take(k);
    if (reader.overrun() || quotient > UINT8_MAX * 2)
      value = INT8_MAX + 1;
    else
      value += FromZigzag(static_cast<uint32_t>(quotient << k) + rest);
    if (value < INT8_MIN || value > INT8_MAX) {
      out->clear();
      return absl::InvalidArgumentError(
          absl::StrFormat("the difference of run %d of %d ends nowhere or leaves a byte", i, count));
    }
    (*out)[i] = static_cast<int8_t>(value);
  }
  if (reader.AtPaddedEnd()) return absl::OkStatus();
  out->clear();
  return absl::InvalidArgumentError(absl::StrFormat("bits are left over behind the values of %d runs", count));
}

}  // namespace gradwire
