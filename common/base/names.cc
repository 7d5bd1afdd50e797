// See names.h.
#include "common/base/names.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_format.h"

namespace gradwire {
namespace {

struct Character {
  size_t bytes = 1;
  bool plain = false;
};

bool IsPlain(uint32_t point) {
  const bool control = point < 0x20 || (point >= 0x7f && point < 0xa0);
  const bool line = point == 0x2028 || point == 0x2029;
  const bool direction = point == 0x200e || point == 0x200f || (point >= 0x202a && point <= 0x202e) ||
                         (point >= 0x2066 && point <= 0x2069);
  return !control && !line && !direction && point != 0xfeff;
}

// The first one of `text`, which is not empty. One byte that is not plain where it is no UTF-8.
Character First(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {1, IsPlain(lead)};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t point = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    point = point << 6 | (byte(i) & 0x3fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xd800 && point < 0xe000;
  if (point < kLeast[bytes] || point > 0x10ffff || surrogate) return {};
  return {bytes, IsPlain(point)};
}

std::string Escaped(std::string_view character) {
  if (character == "\n") return "\\n";
  if (character == "\t") return "\\t";
  if (character == "\r") return "\\r";
  std::string escaped;
  for (const char c : character) escaped += absl::StrFormat("\\x%02x", static_cast<uint8_t>(c));
  return escaped;
}

}  // namespace

bool IsName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxNameBytes && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

bool IsServerName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxServerNameBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

bool IsPlainText(std::string_view text) {
  while (!text.empty()) {
    const Character first = First(text);
    if (!first.plain) return false;
    text.remove_prefix(first.bytes);
  }
  return true;
}

absl::Status CheckServerName(std::string_view what, std::string_view text) {
  if (IsServerName(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s' (%d bytes); it must be 1 to %d printable ASCII "
                      "characters without blanks",
                      std::string(what), Printable(text), text.size(), kMaxServerNameBytes));
}

std::string Printable(std::string_view text, size_t limit) {
  std::string shown;
  while (!text.empty()) {
    const Character first = First(text);
    const std::string_view character = text.substr(0, first.bytes);
    const std::string next = first.plain ? std::string(character) : Escaped(character);
    if (shown.size() + next.size() > limit) return shown + "...";
    shown += next;
    text.remove_prefix(first.bytes);
  }
  return shown;
}

}  // namespace gradwire
