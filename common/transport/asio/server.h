// One connection at the server: calls, one after the other, or a stream. The listener (listener.cc) accepts it.
#pragma once

#include <atomic>
#include <memory>

#include "common/base/clock.h"
#include "common/transport/asio/connection.h"
#include "common/transport/transport.h"

namespace gradwire::transport::tcp {

// What connections need of their listener. Thread-safe.
class ServerOwner : public ConnectionOwner {
 public:
  // The first packet has come.
  virtual void Opened() = 0;
  // A stream is wanted. False: there are as many as there may be. True: it is counted until Closed.
  virtual bool StreamOpened() = 0;
  // Nothing of the service is used any more.
  virtual void Closed(bool opened, bool stream) = 0;
};

class ServerConnection final : public Connection {
 public:
  ServerConnection(const Endpoint& endpoint, ServerOwner* owner, Service* service, asio::ip::tcp::socket socket);
  void Start() { ReadMore(); }
  // The listener shuts down: ends the stream, or the connection once a call that runs was answered.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Nothing runs on it: no stream, no call. From any thread, as the next.
  bool idle() const { return !busy_.load(std::memory_order_relaxed) && !killed(); }
  // When it was of use last.
  TimeNs used() const { return used_.load(std::memory_order_relaxed); }

 private:
  void OnPreface() override;
  absl::Status OnPacket(Packet packet) override;
  void OnBadInput(const absl::Status& status) override;
  void OnCoreClosed() override;

  void Open(const Packet& packet);
  void Call(const Packet& packet);
  // A first packet is in order: the connection is used, as said.
  void Begin(int lost_ticks, bool give);

  ServerOwner* const owner_;
  Service* const service_;
  // Of the thread that reads.
  enum class Use { kNone, kCalls, kStream } use_ = Use::kNone;
  bool counted_ = false;  // as a stream
  std::unique_ptr<StreamSink> sink_;
  std::shared_ptr<Stream> handle_;

  std::atomic<bool> busy_ = false;
  std::atomic<TimeNs> used_ = SteadyClock().Now();

  bool opened_ ABSL_GUARDED_BY(mu_) = false;
  bool in_call_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::transport::tcp
