// One TCP connection and the stream on it, as far as both ends have it in common: a bounded send queue, reading with
// backpressure, signs of life, and one end. ClientStream and ServerConnection say what packets mean.
//
// Who sends writes to the socket right away; only what it does not take waits for the poller. Who receives runs the
// sink on its own thread before it reads on. Sinks are closed by threads of the poller, never within Send or Finish.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/asio/io_queue.h"
#include "common/transport/asio/message_reader.h"
#include "common/transport/asio/tcp_format.h"
#include "common/transport/caps.h"
#include "common/transport/transport.h"

struct iovec;

namespace gradwire::transport::tcp {

class Connection;

// Where connections are kept alive. Thread-safe.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // Its sink was closed and nothing of it is under way any more.
  virtual void Ended(Connection* connection) = 0;
  // More memory than there may be is held by messages that have come in part.
  virtual void Reclaim() {}
};

// What every connection of a channel or listener shares.
struct Endpoint {
  Limits limits;
  Caps caps = {};  // of a listener
  std::shared_ptr<IoQueue> queue = std::make_shared<IoQueue>();
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>();
};

// TCP_NODELAY, not inherited by programs this one starts, not blocking.
void Prepare(asio::ip::tcp::socket& socket);

// Thread-safe. Shared by its owner, until Ended, and the Stream handle.
// Queue bound: window_bytes plus one message per blocked sender, plus what sinks send (a server reads no further then).
// Of calls it is one reply.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  virtual ~Connection() = default;

  // As Stream's.
  absl::Status Send(Message message) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> TrySend(Message& message) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the stream with `status` in place of what the peer says; unsent messages are dropped.
  void Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // Destruction of the client's handle: cancels, then waits for the end, except inside the sink of this stream, where
  // the sink is dropped instead.
  void Abandon() ABSL_LOCKS_EXCLUDED(mu_);
  // To be called every half of the keepalive time: gives and expects signs of life, bounds what may take its time.
  void Tick() ABSL_LOCKS_EXCLUDED(mu_);
  // Cuts the connection: whatever is under way ends soon. Once: true the first time.
  bool Kill() ABSL_LOCKS_EXCLUDED(mu_);
  // As MessageReader's.
  size_t held_bytes() const { return reader_.held_bytes(); }
  uint64_t turn() const { return reader_.turn(); }
  // Was cut off.
  bool killed() const { return killed_.load(); }

 protected:
  static constexpr int kLostTicks = 4;   // twice the keepalive time
  static constexpr int kFirstTicks = 3;  // at least the keepalive time

  // What is sent: `head` (headers, prefaces), then the parts of the message.
  struct Outgoing {
    std::string head;
    Message message;
    size_t bytes() const { return head.size() + message.control.size() + TotalSize(message.frame); }
    static constexpr size_t kOwnBytes = 256;  // memory that it takes beside those bytes, about
  };

  enum class Side { kClient, kServer };
  // A client's connection is not written to before Pump, when it stands; ReadMore begins reading on either side.
  Connection(Side side, const Endpoint& endpoint, ConnectionOwner* owner, asio::ip::tcp::socket socket,
             std::string peer);

  static Outgoing Pack(PacketType type, absl::StatusCode code, Message message);

  // The preface has come and is in order. Nothing was delivered yet.
  virtual void OnPreface() {}
  // Handles one packet, or the error that ended reading, on a thread of the poller. An error ends the connection.
  virtual absl::Status OnPacket(Packet packet) = 0;
  // The peer sent what cannot be understood.
  virtual void OnBadInput(const absl::Status& status) { Abort(status); }
  // Runs once, after OnClosed of the sink.
  virtual void OnCoreClosed() {}

  void set_sink(StreamSink* sink) ABSL_LOCKS_EXCLUDED(mu_);
  // The connection stands and is used: the peer is lost when it was silent for so many ticks. `give`: so is this end,
  // if it says nothing. Before, the peer has kFirstTicks to begin.
  void Established(int lost_ticks, bool give);
  // The peer does not speak our protocol: these bytes take the place of a status.
  void Farewell(std::string bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void Enqueue(Outgoing outgoing) ABSL_LOCKS_EXCLUDED(mu_);
  void Deliver(Message message) ABSL_LOCKS_EXCLUDED(mu_);
  bool cut() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return broken_; }
  // The peer's final word (client).
  void End(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // Writes what is queued. For the thread that set writing_.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  void ReadMore() ABSL_LOCKS_EXCLUDED(mu_);
  // Reading is over.
  void ReadEnded(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);

  const Side side_;
  const Endpoint endpoint_;
  MessageReader reader_;  // of the thread that reads

  absl::Mutex mu_;
  asio::ip::tcp::socket socket_;  // opened and closed under mu_

 private:
  static constexpr size_t kMaxPieces = 64;  // per call of the kernel
  // Of messages that are completed for it no more: they are sent from a core's cache.
  static constexpr size_t kCompletedBytes = 256u << 10;
  // After so many bytes other connections have their turn.
  static constexpr size_t kBurstBytes = 4u << 20;

  void OnReadable(error_code error, size_t);
  void OnWritable(error_code error, size_t);
  void OnResume(error_code, size_t);
  void OnClose(error_code, size_t);
  // Reads and handles what the socket has, then waits for more. One thread goes on while there is something: what it
  // has received is in its core's cache, and no other one is woken.
  void Read() ABSL_LOCKS_EXCLUDED(mu_);
  // Handles what was received. False: reading is paused.
  bool Process() ABSL_LOCKS_EXCLUDED(mu_);
  bool Sendable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return unsent_bytes() <= endpoint_.limits.send_window_bytes || broken_ || finish_requested_;
  }
  // What a sender that found the window full waits for: it is woken once for half a window, not for each message.
  bool HalfEmpty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return unsent_bytes() <= endpoint_.limits.send_window_bytes / 2 || broken_ || finish_requested_;
  }
  // Fills `pieces` from the front of the queue; how many.
  size_t Gather(iovec* pieces) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `wait`: for room. True: this thread is to Pump.
  absl::StatusOr<bool> Queue(Message message, bool wait) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status QueueAndPump(Message message, bool wait) ABSL_LOCKS_EXCLUDED(mu_);
  // Tells the sink that asked for room, where there is some.
  void TellOfRoom() ABSL_LOCKS_EXCLUDED(mu_);
  // `bytes` were written; what is done with goes to `done`.
  void Written(size_t bytes, std::vector<Outgoing>* done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Shut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ResumeIfPaused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseIfOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // To be called last, without the lock: the owner may drop the connection.
  void ReleaseIfOver() ABSL_LOCKS_EXCLUDED(mu_);
  // What the sink hears when the connection is lost without a word.
  absl::Status Lost(const std::string& why) const;
  // What is said at the end of our direction.
  Outgoing LastWords() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // They were written.
  void AfterLastWords() ABSL_LOCKS_EXCLUDED(mu_);
  // What is queued to be sent, in memory.
  size_t unsent_bytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return queued_bytes_ + Outgoing::kOwnBytes * queue_.size();
  }
  // A server that is called: a stream has signs of life.
  bool answers_calls() const { return side_ == Side::kServer && established_.load() && !give_life_.load(); }
  // A server reads no further while more than this is queued to be sent; no further call while a reply is.
  size_t PauseReadsAbove() const {
    if (side_ == Side::kClient) return SIZE_MAX;
    return answers_calls() ? 0 : endpoint_.limits.send_window_bytes;
  }
  bool over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return final_.has_value(); }

  ConnectionOwner* const owner_;
  const std::string peer_;  // for messages
  Operation<Connection> readable_;
  Operation<Connection> writable_;
  Operation<Connection> resume_;
  Operation<Connection> close_;

  std::atomic<bool> waiting_ = true;  // for the peer
  std::atomic<int> silent_ticks_ = 0;
  std::atomic<bool> established_ = false;
  std::atomic<int> lost_ticks_ = kFirstTicks;
  std::atomic<bool> give_life_ = false;
  std::atomic<bool> sent_ = false;  // since the last tick
  std::atomic<bool> killed_ = false;

  StreamSink* sink_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mu_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;   // of the queue, not written yet
  size_t front_written_ ABSL_GUARDED_BY(mu_) = 0;  // bytes of the queue's front that were written
  size_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;      // messages of the queue's front that are being written
  bool writing_ ABSL_GUARDED_BY(mu_);              // a thread writes, or will when the socket takes more
  bool reading_ ABSL_GUARDED_BY(mu_) = true;       // a thread reads, or will
  bool room_wanted_ ABSL_GUARDED_BY(mu_) = false;  // TrySend found none
  bool telling_ ABSL_GUARDED_BY(mu_) = false;      // the sink is being told of room
  bool paused_ ABSL_GUARDED_BY(mu_) = false;       // reading waits until the peer takes what sinks sent
  bool delivering_ ABSL_GUARDED_BY(mu_) = false;
  bool finish_requested_ ABSL_GUARDED_BY(mu_) = false;
  bool end_queued_ ABSL_GUARDED_BY(mu_) = false;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;  // nothing can be sent any more
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;  // the sink is
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  bool reset_ ABSL_GUARDED_BY(mu_) = false;  // what the peer did not take is of no use to it
  int ending_ticks_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status finish_status_ ABSL_GUARDED_BY(mu_);
  absl::Status abort_status_ ABSL_GUARDED_BY(mu_);
  std::optional<std::string> farewell_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> final_ ABSL_GUARDED_BY(mu_);
  std::string lost_why_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::transport::tcp
