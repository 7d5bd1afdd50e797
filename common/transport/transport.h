// What a transport is: unary calls and bidirectional streams of messages between a client and a service.
// Messages are the same bytes on every transport: a serialized protobuf control message, and optionally raw frame
// bytes that travel behind it without being copied into protobuf (field 15, `bytes frame`, of the message).
//
//   client: Dial(address) -> Channel -> Call / Open        server: Listen(address, Service*) -> Listener
//
// The scheme of an address chooses a transport: inproc://, grpc://, unix://, tcp:// (address.h). Later: grpcs://,
// wan://.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"

namespace gradwire::transport {

// Methods are named as in gRPC: "gradwire.v1.Worker/Push".
using Method = std::string_view;

struct Message {
  std::string control;       // serialized protobuf, without the `frame` field
  std::vector<Bytes> frame;  // raw bytes; on the receiving side usually one or a few slices, never copied twice
  // Null, or what the bytes of a frame to be sent still need, and not its size: so that reading them twice is reading
  // them in a core's cache. Transports call Complete right before they send or deliver it.
  std::function<void()> late = nullptr;
  void Complete() {
    if (late != nullptr) std::exchange(late, nullptr)();
  }
};

// Receives what a stream delivers. Calls for one stream never overlap and come in order, but for OnRoom, which may come
// beside OnMessage; OnClosed is the last call.
class StreamSink {
 public:
  virtual ~StreamSink() = default;
  // At most one further message is received before this returns: a slow sink slows its sender down (backpressure).
  virtual void OnMessage(Message message) = 0;
  // Once after each time that TrySend found no room: half of the window is empty. On any thread that sends on the
  // stream or serves the transport, so possibly inside a call of Send or TrySend.
  virtual void OnRoom() {}
  // The peer finished (OK), failed, or the connection was lost (a client sees Unavailable, a server Cancelled).
  // Nothing is delivered afterwards, and nothing can be sent: a server's sink hears of a client's half-close here,
  // after what the server had queued was sent, so a client that expects answers half-closes when it has them.
  virtual void OnClosed(absl::Status status) = 0;
};

// One direction of sending on a bidirectional stream. Thread-safe. Destroying it cancels the stream if it is open;
// the destructor returns only when the sink will not be called again, unless it runs inside a call of the sink.
class Stream {
 public:
  virtual ~Stream() = default;
  // Queues a message. Blocks while more than the transport's window (default 8 MiB) is queued unsent, unless called
  // from inside a sink of this transport, where it never blocks. Fails once the stream is closed.
  virtual absl::Status Send(Message message) = 0;
  // Never blocks. True: `message` is queued. False: Send would block here, inside a sink as well; `message` is as it
  // was, and the sink's OnRoom follows, or its OnClosed. Errors: as Send. A stream without a window has room always.
  virtual absl::StatusOr<bool> TrySend(Message& message) {
    const absl::Status sent = Send(std::move(message));
    if (!sent.ok()) return sent;
    return true;
  }
  // Client: half-closes. Server: ends the stream with `status`. Queued messages are still sent first.
  virtual void Finish(absl::Status status = absl::OkStatus()) = 0;
  // Ends the stream at once; the sink gets OnClosed(Cancelled).
  virtual void Cancel() = 0;
};

// Client end of a connection. Thread-safe. Destroying it cancels its open streams and waits for their OnClosed; it must
// not be destroyed inside a sink. After a lost connection the next Call or Open connects anew.
class Channel {
 public:
  virtual ~Channel() = default;
  // Unary call, blocking. Errors of the service come back unchanged (code and message); a lost connection is
  // Unavailable, a missed deadline DeadlineExceeded.
  virtual absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) = 0;
  // Opens a stream; `sink` must live until OnClosed was called or the stream was destroyed. Does not wait for the peer:
  // a refusal or a dead peer is reported here or by OnClosed.
  virtual absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) = 0;
  // A thread that waits for a message may call this over and over instead of blocking: what arrives is given to the
  // sinks right on it, and no other thread must be woken. Never waits; does a little at a time. From the first call on
  // the channel's own threads receive nothing until StopPolling, or until nobody has called for some milliseconds.
  // False where a transport cannot do this. Must not be called inside a sink.
  virtual bool Poll() { return false; }
  // A thread that has polled calls this before it blocks.
  virtual void StopPolling() {}
};

// Implemented by the server, and by tests. Thread-safe: calls come from many threads.
class Service {
 public:
  virtual ~Service() = default;
  virtual absl::StatusOr<std::string> Call(Method method, std::string_view request) = 0;
  // A client opened a stream. The sink that the service returns receives the client's messages; the transport keeps it
  // until its OnClosed has returned. `stream` is valid until then too, and must not be used afterwards: the service
  // calls stream->Finish to end the stream, and the sink gets OnClosed exactly once in any case.
  virtual absl::StatusOr<std::unique_ptr<StreamSink>> Accept(Method method, std::shared_ptr<Stream> stream) = 0;
};

// A listening address. Destroying it stops listening, ends open streams with Unavailable and waits for their sinks and
// for running calls; it must not be destroyed inside one.
class Listener {
 public:
  virtual ~Listener() = default;
  // The address clients dial; an asked-for port 0 is filled in.
  virtual std::string address() const = 0;
  // Health as grpc.health.v1 reports it (no-op where the transport has none).
  virtual void SetServing(bool serving) = 0;
};

struct Limits {
  size_t max_message_bytes = 8u << 20;  // a larger message is refused by the receiver
  size_t send_window_bytes = 8u << 20;
  int64_t keepalive_ms = 5000;  // a silent peer is noticed within about twice this
  // How long a listener busy-waits for the next message, while messages come that fast; 0: never. That saves the time
  // of waking its thread; in the long run at most an eighth of spin_us is wasted per wait.
  int64_t spin_us = 100;
};

// dial.cc defines both, and knows every implementation. Errors: InvalidArgument for an address that cannot be parsed
// (the message lists the schemes), Unavailable when an address cannot be bound.
absl::StatusOr<std::shared_ptr<Channel>> Dial(std::string_view address, const Limits& limits = {});
absl::StatusOr<std::unique_ptr<Listener>> Listen(std::string_view address, Service* service, const Limits& limits = {});

// While the result lives, Dial of `address` in this process leads to `service` as inproc:// does: nothing is copied to
// the kernel and back. For who serves there to others as well; `address` is the one that they dial, letter for letter.
// Behind its end a channel that was dialled meanwhile goes over the network, or to the next result for `address`.
// Errors: InvalidArgument; Unavailable where it is taken.
absl::StatusOr<std::unique_ptr<Listener>> ListenInProcess(std::string_view address, Service* service,
                                                          const Limits& limits = {});

}  // namespace gradwire::transport
