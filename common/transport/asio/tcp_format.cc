// See tcp_format.h and proto/TCP.md.
#include "common/transport/asio/tcp_format.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/little_endian.h"

namespace gradwire::transport::tcp {
namespace {

constexpr size_t kCheckOffset = 12;  // in a packet's header
constexpr size_t kCrcOffset = 16;
constexpr size_t kPrefaceCrcOffset = 12;
constexpr std::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n";

std::string_view Text(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Whether packets of this type have a control part and a body.
bool MayHaveControl(PacketType type) { return type != PacketType::kHalfClose && type != PacketType::kAlive; }
bool MayHaveBody(PacketType type) {
  return type == PacketType::kCall || type == PacketType::kReply || type == PacketType::kMessage;
}

absl::Status Damaged() { return absl::DataLossError("the preface of the connection was damaged on its way"); }

}  // namespace

std::array<uint8_t, kPrefaceBytes> StorePreface() {
  std::array<uint8_t, kPrefaceBytes> bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  Store<uint16_t>(bytes.data() + 8, kVersion);
  Store<uint16_t>(bytes.data() + 10, kOldestVersion);
  Store<uint32_t>(bytes.data() + kPrefaceCrcOffset, Crc32c({bytes.data(), kPrefaceCrcOffset}));
  return bytes;
}

absl::Status CheckPreface(std::span<const uint8_t> bytes) {
  const size_t of_magic = std::min(bytes.size(), kMagic.size());
  size_t strange = 0;  // bytes of the magic
  for (size_t i = 0; i < of_magic; ++i) strange += bytes[i] != static_cast<uint8_t>(kMagic[i]) ? 1 : 0;
  // One strange byte is damage, more are a stranger: which of the two it is may show later.
  if (strange == 1) return of_magic == kMagic.size() ? Damaged() : absl::OkStatus();
  if (strange != 0) {
    // An HTTP/2 server begins with a SETTINGS frame: three bytes of length, type 4, no flags.
    const bool http2 = bytes.size() >= 5 && bytes[0] == 0 && bytes[3] == 4;
    const std::string_view is = http2 ? " (it may be a gRPC server: dial grpc://host:port)"
                                : absl::StartsWith(std::string(Text(bytes)), "HTTP") ? " (it is an HTTP server)"
                                                                                     : "";
    return absl::FailedPreconditionError(
        absl::StrCat("the peer does not speak Gradwire's tcp:// protocol", std::string(is),
                     "; use the address and scheme that the server printed when it started"));
  }
  if (bytes.size() < kPrefaceBytes) return absl::OkStatus();
  // Version 1 had no check: there it is 0.
  const uint32_t crc = Load<uint32_t>(bytes.data() + kPrefaceCrcOffset);
  if (crc != 0 && crc != Crc32c(bytes.first(kPrefaceCrcOffset))) return Damaged();
  const uint16_t version = Load<uint16_t>(bytes.data() + 8);
  const uint16_t oldest = Load<uint16_t>(bytes.data() + 10);
  if (std::min(version, kVersion) >= std::max(oldest, kOldestVersion)) return crc != 0 ? absl::OkStatus() : Damaged();
  return absl::FailedPreconditionError(
      absl::StrFormat("the peer speaks versions %d to %d of the tcp:// protocol, this end %d to %d: upgrade the older",
                      oldest, version, kOldestVersion, kVersion));
}

bool LooksLikeHttp2(std::span<const uint8_t> bytes) {
  const size_t n = std::min(bytes.size(), kHttp2Preface.size());
  return n >= 4 && Text(bytes.first(n)) == kHttp2Preface.substr(0, n);
}

std::string Http2GoAway() {
  constexpr std::string_view kReason =
      "this port speaks Gradwire's tcp:// protocol, not gRPC: dial tcp://host:port, or let the server listen on "
      "grpc://";
  constexpr uint8_t kSettings = 4, kGoAway = 7, kProtocolError = 1;
  std::string out;
  const auto frame = [&out](size_t bytes, uint8_t type) {  // on stream 0, without flags
    const char header[9] = {0, static_cast<char>(bytes >> 8), static_cast<char>(bytes), static_cast<char>(type)};
    out.append(header, sizeof(header));
  };
  frame(0, kSettings);
  frame(8 + kReason.size(), kGoAway);
  out.append({0, 0, 0, 0, 0, 0, 0, static_cast<char>(kProtocolError)});
  out.append(kReason);
  return out;
}

uint32_t PartsCheck(PacketType type, std::string_view control, std::span<const Bytes> body) {
  uint32_t crc = Crc32c({reinterpret_cast<const uint8_t*>(control.data()), control.size()});
  if (type == PacketType::kMessage) return crc;
  for (const Bytes& slice : body) crc = Crc32c(slice.span(), crc);
  return crc;
}

std::array<uint8_t, kHeaderBytes> StoreHeader(const Header& header) {
  std::array<uint8_t, kHeaderBytes> bytes{};
  bytes[0] = static_cast<uint8_t>(header.type);
  bytes[1] = static_cast<uint8_t>(header.code);
  Store<uint32_t>(bytes.data() + 4, header.control_bytes);
  Store<uint32_t>(bytes.data() + 8, header.body_bytes);
  Store<uint32_t>(bytes.data() + kCheckOffset, header.check);
  Store<uint32_t>(bytes.data() + kCrcOffset, Crc32c({bytes.data(), kCrcOffset}));
  return bytes;
}

absl::StatusOr<Header> LoadHeader(std::span<const uint8_t, kHeaderBytes> bytes) {
  const uint32_t crc = Crc32c(bytes.first(kCrcOffset));
  if (crc != Load<uint32_t>(bytes.data() + kCrcOffset)) {
    return absl::DataLossError(absl::StrFormat("a packet header fails its CRC-32C (computed 0x%08x, stored 0x%08x)",
                                               crc, Load<uint32_t>(bytes.data() + kCrcOffset)));
  }
  const auto bad = [](const std::string& what) { return absl::InvalidArgumentError(what); };
  if (bytes[0] < 1 || bytes[0] > static_cast<uint8_t>(PacketType::kAlive))
    return bad(absl::StrFormat("unknown packet type %d", bytes[0]));
  Header header;
  header.type = static_cast<PacketType>(bytes[0]);
  const bool has_code = header.type == PacketType::kReply || header.type == PacketType::kStatus;
  if (bytes[1] > (has_code ? 16 : 0))
    return bad(absl::StrFormat("a packet of type %d with code %d", bytes[0], bytes[1]));
  header.code = static_cast<absl::StatusCode>(bytes[1]);
  if (Load<uint16_t>(bytes.data() + 2) != 0) return bad("reserved bytes of a packet header are not zero");
  header.control_bytes = Load<uint32_t>(bytes.data() + 4);
  header.body_bytes = Load<uint32_t>(bytes.data() + 8);
  header.check = Load<uint32_t>(bytes.data() + kCheckOffset);
  if ((header.control_bytes != 0 && !MayHaveControl(header.type)) ||
      (header.body_bytes != 0 && !MayHaveBody(header.type))) {
    return bad(absl::StrFormat("a packet of type %d with %d bytes of control and %d of body", bytes[0],
                               header.control_bytes, header.body_bytes));
  }
  if (header.control_bytes > kMaxControlBytes) {
    return bad(
        absl::StrFormat("a control part of %d bytes; at most %d are allowed", header.control_bytes, kMaxControlBytes));
  }
  return header;
}

}  // namespace gradwire::transport::tcp
