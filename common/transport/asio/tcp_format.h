// The bytes of tcp://: preface and packet header. Spec: proto/TCP.md. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"

namespace gradwire::transport::tcp {

inline constexpr std::string_view kMagic = "GWIRETCP";
inline constexpr uint16_t kVersion = 2;
inline constexpr uint16_t kOldestVersion = 2;
inline constexpr size_t kPrefaceBytes = 16;
inline constexpr size_t kHeaderBytes = 20;
inline constexpr size_t kMaxControlBytes = 65536;

enum class PacketType : uint8_t {
  kCall = 1,
  kReply = 2,
  kOpen = 3,
  kMessage = 4,
  kHalfClose = 5,
  kStatus = 6,
  kAlive = 7,
};

struct Header {
  PacketType type{};
  absl::StatusCode code = absl::StatusCode::kOk;
  uint32_t control_bytes = 0;
  uint32_t body_bytes = 0;
  uint32_t check = 0;  // of the parts, see PartsCheck
};

std::array<uint8_t, kPrefaceBytes> StorePreface();
// `bytes`: what has come of the peer's preface, so that a stranger is known by its first bytes. OK while it may still
// become one. FailedPrecondition: no preface, or of versions that this end does not speak; says what it may be instead.
// DataLoss: a preface that was damaged on its way.
absl::Status CheckPreface(std::span<const uint8_t> bytes);
// Those bytes begin as an HTTP/2 client does.
bool LooksLikeHttp2(std::span<const uint8_t> bytes);
// What tells a gRPC client that it dialled the wrong scheme: empty SETTINGS, then GOAWAY with the reason.
std::string Http2GoAway();

// The CRC-32C of a packet's parts: the control part and, but for MESSAGE, the body. That of a MESSAGE carries its own.
uint32_t PartsCheck(PacketType type, std::string_view control, std::span<const Bytes> body);

std::array<uint8_t, kHeaderBytes> StoreHeader(const Header& header);
// DataLoss: the CRC is wrong. InvalidArgument: unknown type or code, reserved bytes that are not zero, parts that this
// type has not, too long a control part.
absl::StatusOr<Header> LoadHeader(std::span<const uint8_t, kHeaderBytes> bytes);

}  // namespace gradwire::transport::tcp
