// See stream_exchange.h. Control messages are PullRequests: bucket_begin says what is asked, version how many bytes.
#include "tests/bench/exchange/stream_exchange.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "gradwire/v1/worker.pb.h"
#include "tests/bench/exchange/measure.h"
#include "tests/bench/exchange/peer_process.h"

namespace gradwire::bench {
namespace {

using transport::Message;
using transport::Stream;
using transport::StreamSink;

enum Ask : uint32_t { kChunk = 1, kLastChunk = 2, kPull = 3, kEcho = 4 };

std::string Control(Ask ask, uint64_t frames = 0, uint64_t frame_bytes = 0) {
  v1::PullRequest request;
  request.set_bucket_begin(ask);
  request.set_bucket_end(static_cast<uint32_t>(frames));
  request.set_version(frame_bytes);
  return request.SerializeAsString();
}

// Chunks of one frame out of `buffer`; `send` gets each.
void SendFrame(size_t frame_bytes, const std::vector<uint8_t>& buffer, const std::function<void(Message)>& send) {
  static const std::string chunk = Control(kChunk);
  static const std::string last = Control(kLastChunk);
  for (size_t sent = 0; sent < frame_bytes;) {
    const size_t offset = sent % buffer.size();
    const size_t step = std::min({frame_bytes - sent, buffer.size() - offset, kStreamChunkBytes});
    sent += step;
    Message message;
    message.control = sent == frame_bytes ? last : chunk;
    message.frame.push_back(Bytes::Borrow({buffer.data() + offset, step}));
    send(std::move(message));
  }
}

class DroppingSink : public StreamSink {
 public:
  DroppingSink(std::shared_ptr<Stream> stream, const std::vector<uint8_t>* source)
      : stream_(std::move(stream)), source_(source) {}
  ~DroppingSink() override {
    if (sender_.joinable()) sender_.join();
  }
  void OnMessage(Message message) override {
    v1::PullRequest request;
    if (!request.ParseFromString(message.control)) return stream_->Finish(absl::InvalidArgumentError("bad control"));
    switch (request.bucket_begin()) {
      case kLastChunk:
        (void)stream_->Send(Message{Control(kLastChunk), {}});
        break;
      case kEcho:
        (void)stream_->Send(std::move(message));
        break;
      case kPull:
        if (sender_.joinable()) sender_.join();
        sender_ = std::thread([this, frames = request.bucket_end(), bytes = request.version()] {
          for (uint32_t i = 0; i < frames; ++i)
            SendFrame(bytes, *source_, [this](Message m) { (void)stream_->Send(std::move(m)); });
        });
        break;
    }
  }
  void OnClosed(absl::Status) override {}

 private:
  const std::shared_ptr<Stream> stream_;
  const std::vector<uint8_t>* const source_;
  std::thread sender_;
};

class DroppingService : public transport::Service {
 public:
  absl::StatusOr<std::string> Call(transport::Method, std::string_view request) override {
    return std::string(request);
  }
  absl::StatusOr<std::unique_ptr<StreamSink>> Accept(transport::Method, std::shared_ptr<Stream> stream) override {
    return std::make_unique<DroppingSink>(std::move(stream), &source_);
  }

 private:
  const std::vector<uint8_t> source_ = std::vector<uint8_t>(64 << 20, 7);
};

}  // namespace

void RunStreamPeer(const std::string& address) {
  DroppingService service;
  auto listener = transport::Listen(address, &service);
  Check(listener.status());
  ServePeer((*listener)->address());
}

StreamClient::StreamClient(const std::string& address) {
  auto channel = transport::Dial(address);
  Check(channel.status());
  channel_ = *std::move(channel);
  auto stream = channel_->Open("gradwire.v1.Worker/Push", this);
  Check(stream.status());
  stream_ = *std::move(stream);
}

StreamClient::~StreamClient() { stream_.reset(); }

void StreamClient::Send(Message message) { Check(stream_->Send(std::move(message))); }

void StreamClient::OnMessage(Message message) {
  if (on_echo_) return on_echo_();
  absl::MutexLock lock(&mu_);
  bytes_ += TotalSize(message.frame);
  v1::PullRequest request;
  if (request.ParseFromString(message.control) && request.bucket_begin() != kChunk) ++acks_;
}

void StreamClient::OnClosed(absl::Status status) {
  if (!absl::IsCancelled(status)) Check(status);
}

void StreamClient::WaitUntil(size_t acks, size_t bytes) {
  absl::MutexLock lock(&mu_);
  const auto done = [&] { return acks_ >= acks && bytes_ >= bytes; };
  mu_.Await(absl::Condition(&done));
  acks_ = 0;
  bytes_ = 0;
}

void StreamClient::Push(size_t frames, size_t frame_bytes, const std::vector<uint8_t>& buffer) {
  for (size_t i = 0; i < frames; ++i) SendFrame(frame_bytes, buffer, [this](Message m) { Send(std::move(m)); });
  WaitUntil(frames, 0);
}

void StreamClient::Pull(size_t frames, size_t frame_bytes) {
  Send(Message{Control(kPull, frames, frame_bytes), {}});
  WaitUntil(frames, frames * frame_bytes);
}

void StreamClient::SendEcho(size_t bytes) {
  static const std::string control = Control(kEcho);
  Send(Message{control, {Bytes::FromString(std::string(bytes, 'e'))}});
}

void StreamClient::Echo(size_t bytes) {
  SendEcho(bytes);
  channel_->StopPolling();
  WaitUntil(1, bytes);
}

void StreamClient::EchoPolling(size_t bytes) {
  SendEcho(bytes);
  const auto arrived = [this] {
    absl::MutexLock lock(&mu_);
    return acks_ > 0;
  };
  while (!arrived()) channel_->Poll();
  WaitUntil(1, bytes);
}

std::vector<double> StreamClient::EchoInSink(size_t count, size_t bytes) {
  using Clock = std::chrono::steady_clock;
  const std::string control = Control(kEcho);
  std::vector<double> seconds;
  Clock::time_point start;
  const auto send = [&] {
    start = Clock::now();
    Send(Message{control, {Bytes::FromString(std::string(bytes, 'e'))}});
  };
  on_echo_ = [&] {
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    if (seconds.size() < count) return send();
    absl::MutexLock lock(&mu_);
    acks_ = 1;
  };
  send();
  WaitUntil(1, 0);
  on_echo_ = nullptr;
  return seconds;
}

}  // namespace gradwire::bench
