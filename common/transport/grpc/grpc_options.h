// Channel arguments of both ends. What mattered when it was measured is in ../README.md.
#pragma once

#include <grpc/grpc.h>

#include <functional>

#include "common/transport/grpc/message_codec.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Keeps gRPC's library initialised until the process ends. Otherwise destroying the last channel or server would shut
// the library down, which can wait ten seconds for one of its own pollers.
inline void KeepGrpcInitialised() {
  static const bool initialised = (grpc_init(), true);
  (void)initialised;
}

// How much gRPC takes of a stream that has more to send before the socket took it: the next message is then there when
// the socket wants it.
inline constexpr int kWriteBufferBytes = 4 << 20;

// What is received at a time, at most: so much stays in a core's cache until it is consumed. HTTP/2 frames that cut
// nothing of it.
inline constexpr int kMaxReadBytes = 256 << 10;
inline constexpr int kMaxFrameBytes = 1 << 20;

// Calls `set` for every argument that client and server share.
inline void ForEachGrpcArgument(const Limits& limits, const std::function<void(const char*, int)>& set) {
  const int keepalive_ms = static_cast<int>(limits.keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  set(GRPC_ARG_HTTP2_BDP_PROBE, 1);
  set(GRPC_ARG_TCP_TX_ZEROCOPY_ENABLED, 0);
  set(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, kWriteBufferBytes);
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kMaxFrameBytes);
  set(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kMaxReadBytes);
  set(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, static_cast<int>(limits.max_message_bytes + kCheckBytes));
  set(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1);  // the receiver refuses; the sender need not agree on the limit
}

}  // namespace gradwire::transport
