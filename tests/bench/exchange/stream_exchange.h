// The contestant: frames over one stream of a transport, to and from a service in another process that drops them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "common/transport/transport.h"

namespace gradwire::bench {

constexpr size_t kStreamChunkBytes = 1 << 20;  // of a frame, per message

// In the peer process: listens on `address`.
void RunStreamPeer(const std::string& address);

// Not thread-safe.
class StreamClient : private transport::StreamSink {
 public:
  explicit StreamClient(const std::string& address);
  ~StreamClient() override;

  // Pushes `frames` frames of `frame_bytes` without waiting in between, then waits for all acknowledgements.
  void Push(size_t frames, size_t frame_bytes, const std::vector<uint8_t>& buffer);
  // Asks for `frames` frames of `frame_bytes` and waits for the last byte.
  void Pull(size_t frames, size_t frame_bytes);
  // One message there and one back; the calling thread sleeps in between.
  void Echo(size_t bytes);
  // The same, but the calling thread receives by itself.
  void EchoPolling(size_t bytes);
  // `count` round trips, each started by the sink on the arrival of the one before; their times in seconds.
  std::vector<double> EchoInSink(size_t count, size_t bytes);

 private:
  void OnMessage(transport::Message message) override;
  void OnClosed(absl::Status status) override;
  void Send(transport::Message message);
  void SendEcho(size_t bytes);
  void WaitUntil(size_t acks, size_t bytes);

  std::shared_ptr<transport::Channel> channel_;
  std::function<void()> on_echo_;  // of EchoInSink; called by the sink
  absl::Mutex mu_;
  size_t acks_ = 0;  // guarded by mu_, as is bytes_
  size_t bytes_ = 0;
  std::unique_ptr<transport::Stream> stream_;
};

}  // namespace gradwire::bench
