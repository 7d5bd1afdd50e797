// See peer_channel.h.
#include "tests/sim/peer_channel.h"

#include <utility>

namespace gradwire::sim {
namespace {

// Hands on what comes, until the stream that it is of is destroyed.
class SinkEnd final : public ClientEnd {
 public:
  explicit SinkEnd(transport::StreamSink* sink) : sink_(sink) {}
  void OnMessage(const transport::Message& message) override {
    if (sink_ != nullptr) sink_->OnMessage(message);
  }
  void OnClosed(const absl::Status& status) override {
    if (transport::StreamSink* const sink = std::exchange(sink_, nullptr)) sink->OnClosed(status);
  }
  void Detach() { sink_ = nullptr; }
  bool open() const { return sink_ != nullptr; }

 private:
  transport::StreamSink* sink_;
};

class PeerStream final : public transport::Stream {
 public:
  PeerStream(World* world, std::shared_ptr<SimStream> stream, std::shared_ptr<SinkEnd> end)
      : world_(world), stream_(std::move(stream)), end_(std::move(end)) {}
  ~PeerStream() override {
    end_->Detach();
    Cancel();
  }
  absl::Status Send(transport::Message message) override {
    if (!end_->open()) return absl::CancelledError("the stream is closed");
    return stream_->Send(std::move(message));
  }
  void Finish(absl::Status) override { Cancel(); }
  void Cancel() override { stream_->Break(0, world_->Between(kUs, 20 * kMs)); }

 private:
  World* const world_;
  const std::shared_ptr<SimStream> stream_;
  const std::shared_ptr<SinkEnd> end_;
};

}  // namespace

absl::StatusOr<std::string> PeerChannel::Call(transport::Method method, std::string request, int64_t) {
  ServerProcess* const server = peer_->process();
  if (server == nullptr) return absl::UnavailableError("connection refused");
  return server->target().service->Call(method, request);
}

absl::StatusOr<std::unique_ptr<transport::Stream>> PeerChannel::Open(transport::Method method,
                                                                     transport::StreamSink* sink) {
  ServerProcess* const server = peer_->process();
  if (server == nullptr) return absl::UnavailableError("connection refused");
  auto end = std::make_shared<SinkEnd>(sink);
  auto stream = std::make_shared<SimStream>(world_, path_);
  server->Adopt(stream);
  stream->Open(server->target().service, method, end,
               [peer = peer_, id = server->id()] { return peer->process() != nullptr && peer->process()->id() == id; });
  *last_ = stream;
  return std::make_unique<PeerStream>(world_, std::move(stream), std::move(end));
}

}  // namespace gradwire::sim
