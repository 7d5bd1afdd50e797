// See network.h.
#include "tests/sim/network.h"

#include <algorithm>
#include <utility>

namespace gradwire::sim {

class SimStream::ServerEnd final : public transport::Stream {
 public:
  explicit ServerEnd(std::weak_ptr<SimStream> stream) : stream_(std::move(stream)) {}

  absl::Status Send(transport::Message message) override {
    const std::shared_ptr<SimStream> stream = stream_.lock();
    if (stream == nullptr || stream->finished_ || stream->sink_ == nullptr)
      return absl::CancelledError("the stream is closed");
    if (stream->broken_ || !stream->server_lives_()) return absl::OkStatus();  // into a connection that is no more
    World* const world = stream->world_;
    message.Complete();
    world->At(stream->Arrival(&stream->last_down_), [stream, message = std::move(message)] {
      if (!stream->broken_ && stream->client_ != nullptr) stream->client_->OnMessage(message);
    });
    return absl::OkStatus();
  }

  void Finish(absl::Status status) override {
    const std::shared_ptr<SimStream> stream = stream_.lock();
    if (stream == nullptr || stream->finished_) return;
    stream->finished_ = true;
    stream->world_->After(0, [stream] { stream->CloseServer(absl::OkStatus()); });
    if (stream->broken_ || !stream->server_lives_()) return;
    stream->world_->At(stream->Arrival(&stream->last_down_), [stream, status = std::move(status)] {
      if (!stream->broken_) stream->CloseClient(status);
    });
  }

  void Cancel() override { Finish(absl::CancelledError("cancelled")); }

 private:
  const std::weak_ptr<SimStream> stream_;
};

TimeNs SimStream::Arrival(TimeNs* last) {
  TimeNs when = world_->Now() + world_->Between(20 * kUs, path_->slowest);
  when = std::max({when, path_->stalled_until, *last});
  return *last = when;
}

void SimStream::Open(transport::Service* service, transport::Method method, std::shared_ptr<ClientEnd> client,
                     std::function<bool()> server_lives) {
  client_ = std::move(client);
  server_lives_ = std::move(server_lives);
  auto accepted = service->Accept(method, std::make_shared<ServerEnd>(weak_from_this()));
  if (accepted.ok()) {
    sink_ = *std::move(accepted);
  } else {
    CloseClient(accepted.status());
  }
}

absl::Status SimStream::Send(transport::Message message) {
  // A client may go on sending into a connection that is gone until it hears of it.
  world_->At(Arrival(&last_up_), [self = shared_from_this(), message = std::move(message)]() mutable {
    if (!self->broken_ && !self->finished_ && self->sink_ != nullptr) self->sink_->OnMessage(std::move(message));
  });
  return absl::OkStatus();
}

void SimStream::Break(TimeNs client_delay, TimeNs server_delay) {
  if (broken_) return;
  broken_ = true;
  const std::shared_ptr<SimStream> self = shared_from_this();
  world_->After(client_delay, [self] { self->CloseClient(absl::UnavailableError("the connection broke")); });
  world_->After(server_delay, [self] { self->CloseServer(absl::CancelledError("the connection broke")); });
}

void SimStream::ServerGone(TimeNs client_delay) {
  sink_ = nullptr;
  Break(client_delay, 0);
}

void SimStream::CloseServer(const absl::Status& status) {
  if (sink_ == nullptr) return;
  const std::unique_ptr<transport::StreamSink> sink = std::move(sink_);
  sink->OnClosed(status);
}

void SimStream::CloseClient(const absl::Status& status) {
  const std::shared_ptr<ClientEnd> client = std::exchange(client_, nullptr);
  if (client != nullptr) client->OnClosed(status);
}

void Call(World* world, Path* path, std::function<Target()> find, std::string method, std::string request,
          TimeNs timeout, std::function<void(absl::StatusOr<std::string>)> done) {
  auto once = std::make_shared<std::function<void(absl::StatusOr<std::string>)>>(std::move(done));
  const auto finish = [once](absl::StatusOr<std::string> reply) {
    if (!*once) return;
    const auto call = std::exchange(*once, nullptr);
    call(std::move(reply));
  };
  world->After(timeout, [finish] { finish(absl::DeadlineExceededError("no reply in time")); });
  const auto delay = [world, path] {
    return std::max(world->Now() + world->Between(20 * kUs, path->slowest), path->stalled_until);
  };
  int copies = 1;
  if (world->Chance(path->loss)) {
    world->Count(Event::kRequestLost);
    copies = 0;
  } else if (world->Chance(path->repeats)) {
    world->Count(Event::kRequestRepeated);
    copies = 2;
  }
  for (int i = 0; i < copies; ++i) {
    world->At(delay(), [world, path, find, method, request, finish, delay] {
      const Target target = find();
      absl::StatusOr<std::string> reply = absl::UnavailableError("connection refused");
      if (target.service != nullptr) {
        reply = target.service->Call(method, request);
        if (world->Chance(path->loss)) return world->Count(Event::kReplyLost);
        if (find().id != target.id) return;  // it died while it answered
      }
      world->At(delay(), [reply, finish] { finish(reply); });
    });
  }
}

}  // namespace gradwire::sim
