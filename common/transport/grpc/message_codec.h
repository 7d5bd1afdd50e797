// Message <-> gRPC ByteBuffer, without copying frames.
// On the wire: the control protobuf's bytes, then field 15 (tag 0x7A, varint length, frame bytes) if there is a frame:
// a legal protobuf message whose last field is `bytes frame = 15`.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// A call whose metadata has this key carries checks: HTTP/2 has none, and TCP's lets one damaged segment of some ten
// thousand pass. Behind the control bytes of every message stands field 2047, fixed32: the CRC-32C of these, of the
// frame's length (the frame carries its own) and of the message's number on its way, for HTTP/2 drops what it takes for
// a frame of another stream. Trailing metadata has that of the status.
inline constexpr char kChecksKey[] = "gradwire-checks";
inline constexpr char kStatusCheckKey[] = "gradwire-check";
inline constexpr size_t kCheckBytes = 6;

// Of unary calls; messages of streams have theirs from EncodeMessage.
void AppendCheck(std::string* message);
// Removes it. `number`: of messages sent before it; 0 for unary calls. DataLoss: it is not there, or is another one.
absl::Status TakeCheck(size_t frame_bytes, uint64_t number, std::string* control);
// Whether `control` ends as one with a check does. On a call whose metadata names no checks it says that these were
// damaged: gRPC keeps a damaged key for all later calls of the connection.
bool EndsWithCheck(std::string_view control);
// The value of kStatusCheckKey.
std::string StatusCheck(int code, std::string_view message);

// Says that the stream is alive and how many messages were sent on it; only on calls that carry checks.
::grpc::ByteBuffer AliveMessage(uint64_t sent);
bool IsAlive(const ::grpc::ByteBuffer& buffer);
// DataLoss: not so many were `received`.
absl::Status CheckAlive(const ::grpc::ByteBuffer& buffer, uint64_t received);

// Slices of the result own references to the frame's Bytes. Small frames are copied behind the control bytes. With a
// check where there is a `number`: of messages sent before it.
::grpc::ByteBuffer EncodeMessage(Message message, std::optional<uint64_t> number = std::nullopt);

// The frame of the result references the slices of `buffer`. InvalidArgument when the top-level fields do not parse,
// or when something follows field 15; where the message has a check, that of `number`, DataLoss for that and for what
// TakeCheck says; without `number`, DataLoss where it has one all the same.
absl::StatusOr<Message> DecodeMessage(const ::grpc::ByteBuffer& buffer, std::optional<uint64_t> number = std::nullopt);

// Unary messages: all bytes as one string.
std::string ToString(const ::grpc::ByteBuffer& buffer);
::grpc::ByteBuffer FromString(std::string_view bytes);

}  // namespace gradwire::transport
