// Message <-> gRPC ByteBuffer, without copying frames.
// On the wire: the control protobuf's bytes, then field 15 (tag 0x7A, varint length, frame bytes) if there is a frame:
// a legal protobuf message whose last field is `bytes frame = 15`.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Bytes that EncodeMessage will produce.
size_t EncodedSize(const Message& message);

// Slices of the result own references to the frame's Bytes. Small frames are copied behind the control bytes.
::grpc::ByteBuffer EncodeMessage(Message message);

// The frame of the result references the slices of `buffer`. InvalidArgument when the top-level fields do not parse,
// or when something follows field 15.
absl::StatusOr<Message> DecodeMessage(const ::grpc::ByteBuffer& buffer);

// Unary messages: all bytes as one string.
std::string ToString(const ::grpc::ByteBuffer& buffer);
::grpc::ByteBuffer FromString(std::string_view bytes);

}  // namespace gradwire::transport
