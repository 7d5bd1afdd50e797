// See connection.h. The flags writing_ and reading_ give the thread that set them, or that runs the operation it
// started, the sole right to write or read. Sinks, the owner and the socket's I/O are called without the lock.
#include "common/transport/asio/connection.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport::tcp {
namespace {

constexpr size_t kMaxStatusBytes = 8192;  // of its message

}  // namespace

void Prepare(asio::ip::tcp::socket& socket) {
  error_code ignored;  // a socket that fails here fails again where it is used
  socket.set_option(asio::ip::tcp::no_delay(true), ignored);
  socket.non_blocking(true, ignored);
  (void)fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
}

Connection::Connection(Side side, const Endpoint& endpoint, ConnectionOwner* owner, asio::ip::tcp::socket socket,
                       std::string peer)
    : side_(side),
      endpoint_(endpoint),
      reader_(endpoint.pool, endpoint.limits.max_message_bytes),
      socket_(std::move(socket)),
      owner_(owner),
      peer_(std::move(peer)),
      readable_(this, &Connection::OnReadable),
      writable_(this, &Connection::OnWritable),
      resume_(this, &Connection::OnResume),
      close_(this, &Connection::OnClose),
      writing_(side == Side::kClient) {}

Connection::Outgoing Connection::Pack(PacketType type, absl::StatusCode code, Message message) {
  const auto header =
      StoreHeader({type, code, static_cast<uint32_t>(message.control.size()),
                   static_cast<uint32_t>(TotalSize(message.frame)), PartsCheck(type, message.control, message.frame)});
  return {std::string(reinterpret_cast<const char*>(header.data()), header.size()), std::move(message)};
}

void Connection::set_sink(StreamSink* sink) {
  absl::MutexLock lock(&mu_);
  sink_ = sink;
}

void Connection::Established(int lost_ticks, bool give) {
  lost_ticks_.store(lost_ticks);
  give_life_.store(give);
  established_.store(true);
}

void Connection::Farewell(std::string bytes) {
  absl::MutexLock lock(&mu_);
  farewell_ = std::move(bytes);
}

absl::Status Connection::Lost(const std::string& why) const {
  if (side_ == Side::kServer)
    return absl::CancelledError(absl::StrCat("the client cancelled the stream, or its connection was lost: ", why));
  if (!established_.load()) return absl::UnavailableError(absl::StrCat("cannot connect to ", peer_, ": ", why));
  return absl::UnavailableError(absl::StrCat("the connection to ", peer_, " was lost: ", why));
}

// ---- Sending ----

absl::Status Connection::Send(Message message) { return QueueAndPump(std::move(message), !SinkScope::Any()); }

absl::StatusOr<bool> Connection::TrySend(Message& message) {
  {
    absl::MutexLock lock(&mu_);
    if (!Sendable()) {
      room_wanted_ = true;
      return false;
    }
  }
  GW_RETURN_IF_ERROR(QueueAndPump(std::move(message), /*wait=*/false));
  return true;
}

absl::Status Connection::QueueAndPump(Message message, bool wait) {
  const absl::StatusOr<bool> first =
      CatchExhausted("a message to send", [&] { return Queue(std::move(message), wait); });
  if (first.ok() && *first) Pump();
  return first.status();
}

absl::StatusOr<bool> Connection::Queue(Message message, bool wait) {
  if (message.control.size() > kMaxControlBytes || TotalSize(message.frame) > UINT32_MAX) {
    return absl::ResourceExhaustedError(absl::StrCat("a message of ", message.control.size(), " bytes of control and ",
                                                     TotalSize(message.frame), " of frame; at most ", kMaxControlBytes,
                                                     " and 2^32 - 1 can be sent: use smaller chunks"));
  }
  Outgoing outgoing = Pack(PacketType::kMessage, absl::StatusCode::kOk, std::move(message));
  {
    absl::MutexLock lock(&mu_);
    if (!Sendable() && wait) mu_.Await(absl::Condition(this, &Connection::HalfEmpty));
    if (broken_ || finish_requested_) {
      if (!abort_status_.ok()) return abort_status_;
      if (over() && !final_->ok()) return *final_;
      if (broken_ && !over()) return Lost("it takes no more");
      return absl::FailedPreconditionError("the stream has ended; open a new one");
    }
    const size_t bytes = outgoing.bytes();
    queue_.push_back(std::move(outgoing));
    queued_bytes_ += bytes;
    return !std::exchange(writing_, true);
  }
}

void Connection::Enqueue(Outgoing outgoing) {
  {
    absl::MutexLock lock(&mu_);
    if (broken_ || over() || (end_queued_ && side_ == Side::kServer)) return;
    queued_bytes_ += outgoing.bytes();
    queue_.push_back(std::move(outgoing));
    if (writing_) return;
    writing_ = true;
  }
  Pump();
}

void Connection::Pump() {
  std::vector<Outgoing> done;  // freed without the lock
  bool ended = false;
  bool room = false;
  for (;;) {
    if (std::exchange(room, false)) TellOfRoom();
    std::array<iovec, kMaxPieces> pieces;
    msghdr message{};
    int socket = -1;
    done.clear();
    {
      absl::MutexLock lock(&mu_);
      in_flight_ = 0;
      if (broken_) DropQueue();
      if (queue_.empty() && finish_requested_ && !end_queued_ && !broken_) {
        end_queued_ = true;
        queue_.push_back(LastWords());
        queued_bytes_ += queue_.back().bytes();
      }
      // An empty message, where there is nothing to say at the end, is written at once.
      if (!queue_.empty()) Written(0, &done);
      if (queue_.empty()) {
        writing_ = false;
        ended = end_queued_ && !broken_;
        break;
      }
      message.msg_iov = pieces.data();
      message.msg_iovlen = Gather(pieces.data());
      socket = socket_.native_handle();
    }
    const ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int why = n < 0 ? errno : 0;
    absl::MutexLock lock(&mu_);
    in_flight_ = 0;
    if (n > 0) {
      sent_.store(true, std::memory_order_relaxed);
      Written(static_cast<size_t>(n), &done);
      if (unsent_bytes() <= PauseReadsAbove()) ResumeIfPaused();
      room = room_wanted_ && HalfEmpty();
    } else if (why == EAGAIN || why == EWOULDBLOCK) {
      if (broken_) continue;
      const absl::Status waits = CatchExhausted("waiting for the peer", [this] {
        socket_.async_wait(asio::ip::tcp::socket::wait_write, IoQueue::Handler(&writable_));
        return absl::OkStatus();
      });
      if (waits.ok()) return;
      broken_ = true;
      Shut();
      ResumeIfPaused();
    } else if (why != EINTR) {
      broken_ = true;
      ResumeIfPaused();
    }
  }
  if (ended) AfterLastWords();
  ReleaseIfOver();
}

Connection::Outgoing Connection::LastWords() {
  if (side_ == Side::kClient) return Pack(PacketType::kHalfClose, absl::StatusCode::kOk, {});
  if (farewell_) return {*farewell_, {}};
  const absl::Status& status = abort_status_.ok() ? finish_status_ : abort_status_;
  return Pack(PacketType::kStatus, status.code(), {std::string(status.message().substr(0, kMaxStatusBytes)), {}});
}

void Connection::AfterLastWords() {
  if (side_ == Side::kClient) return;  // the server has the last word
  absl::MutexLock lock(&mu_);
  if (over()) return;
  if (socket_.is_open()) (void)::shutdown(socket_.native_handle(), SHUT_WR);
  final_ = abort_status_;
  ResumeIfPaused();
  CloseIfOver();
}

void Connection::TellOfRoom() {
  StreamSink* sink = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (over() || closing_ || broken_) return;
    room_wanted_ = false;
    telling_ = true;
    sink = sink_;
  }
  if (sink != nullptr) {
    const SinkScope scope(this);
    sink->OnRoom();
  }
  absl::MutexLock lock(&mu_);
  telling_ = false;
  CloseIfOver();
}

void Connection::OnWritable(error_code, size_t) {
  const std::shared_ptr<Connection> self = shared_from_this();
  Pump();
}

size_t Connection::Gather(iovec* pieces) {
  size_t count = 0;
  size_t completed = 0;
  size_t skip = front_written_;
  const auto add = [&](const void* data, size_t bytes) {
    const size_t step = std::min(skip, bytes);
    skip -= step;
    if (bytes == step || count == kMaxPieces) return bytes == step;
    pieces[count++] = {const_cast<char*>(static_cast<const char*>(data)) + step, bytes - step};
    return true;
  };
  for (Outgoing& item : queue_) {
    if (item.message.late != nullptr) {
      if (completed >= kCompletedBytes) break;
      completed += item.bytes();
      item.message.Complete();
    }
    bool all = add(item.head.data(), item.head.size()) && add(item.message.control.data(), item.message.control.size());
    for (const Bytes& slice : item.message.frame) all = all && add(slice.data(), slice.size());
    ++in_flight_;
    if (!all || count == kMaxPieces) break;
  }
  return count;
}

void Connection::Written(size_t bytes, std::vector<Outgoing>* done) {
  front_written_ += bytes;
  queued_bytes_ -= bytes;
  while (!queue_.empty() && front_written_ >= queue_.front().bytes()) {
    front_written_ -= queue_.front().bytes();
    done->push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
}

void Connection::DropQueue() {
  const size_t keep = broken_ ? in_flight_ : std::max<size_t>(in_flight_, front_written_ != 0 ? 1 : 0);
  while (queue_.size() > keep) {
    queued_bytes_ -= queue_.back().bytes() - (queue_.size() == 1 ? front_written_ : 0);
    queue_.pop_back();
  }
  if (queue_.empty()) front_written_ = 0;
}

// ---- Receiving ----

void Connection::ReadMore() {
  waiting_.store(true);
  const absl::Status waits = CatchExhausted("waiting for the peer", [this] {
    socket_.async_wait(asio::ip::tcp::socket::wait_read, IoQueue::Handler(&readable_));
    return absl::OkStatus();
  });
  if (!waits.ok()) ReadEnded(std::string(waits.message()));
}

void Connection::OnReadable(error_code error, size_t) {
  const std::shared_ptr<Connection> self = shared_from_this();
  waiting_.store(false);
  if (error) return ReadEnded(error.message());
  Read();
}

void Connection::OnResume(error_code, size_t) {
  const std::shared_ptr<Connection> self = shared_from_this();
  if (Process()) Read();
}

void Connection::Read() {
  for (size_t burst = 0; burst < kBurstBytes;) {
    std::array<iovec, 2> pieces;
    size_t space = 0;
    const auto spans = reader_.Space();
    for (size_t i = 0; i < spans.size(); ++i) {
      pieces[i] = {spans[i].data(), spans[i].size()};
      space += spans[i].size();
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t n = recvmsg(socket_.native_handle(), &message, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return ReadMore();
    if (n < 0) return ReadEnded(error_code(errno, asio::error::get_system_category()).message());
    if (n == 0) return ReadEnded(error_code(asio::error::eof).message());
    if (established_.load()) silent_ticks_.store(0);
    const auto bytes = static_cast<size_t>(n);
    burst += bytes;
    reader_.Filled(bytes);
    if (!Process()) return;
    if (bytes < space) return ReadMore();  // that was all
  }
  endpoint_.queue->Post(&resume_);
}

bool Connection::Process() {
  for (bool more = true; more;) {
    const bool had_preface = reader_.has_preface();
    {
      absl::MutexLock lock(&mu_);
      if (over()) {
        // Nothing more is understood, but the peer must see our last words before its connection is reset.
        reader_.Discard();
        break;
      }
      if (unsent_bytes() > PauseReadsAbove() && !broken_) {
        paused_ = true;
        return false;
      }
      delivering_ = true;
    }
    const absl::Status status = CatchExhausted("a connection", [&]() -> absl::Status {
      absl::StatusOr<std::optional<Packet>> packet = reader_.Next();
      if (!had_preface && reader_.has_preface()) OnPreface();
      GW_RETURN_IF_ERROR(packet.status());
      more = packet->has_value();
      return more ? OnPacket(**std::move(packet)) : absl::OkStatus();
    });
    if (side_ == Side::kServer && endpoint_.pool->held_bytes() > endpoint_.caps.receive_bytes) owner_->Reclaim();
    if (!status.ok()) {
      more = false;
      OnBadInput(status);
      reader_.Discard();
    }
    absl::MutexLock lock(&mu_);
    delivering_ = false;
    CloseIfOver();
  }
  return true;
}

void Connection::Deliver(Message message) {
  StreamSink* sink = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (abort_status_.ok() && !over()) sink = sink_;
  }
  if (sink == nullptr) return;
  const SinkScope scope(this);
  sink->OnMessage(std::move(message));
}

void Connection::ReadEnded(const std::string& why) {
  {
    absl::MutexLock lock(&mu_);
    reading_ = false;
    broken_ = true;
    if (!over()) final_ = abort_status_.ok() ? Lost(lost_why_.empty() ? why : lost_why_) : abort_status_;
    DropQueue();
    Shut();
    CloseIfOver();
  }
  reader_.Discard();  // what came in part takes memory
  ReleaseIfOver();
}

void Connection::ResumeIfPaused() {
  if (!std::exchange(paused_, false)) return;
  endpoint_.queue->Post(&resume_);
}

// ---- Ends ----

void Connection::Finish(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    if (finish_requested_) return;
    finish_requested_ = true;
    finish_status_ = std::move(status);
    if (writing_) return;
    writing_ = true;
  }
  Pump();
}

void Connection::Cancel() { Abort(absl::CancelledError("the stream was cancelled by its owner")); }

void Connection::Abort(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    if (over() || !abort_status_.ok()) return;
    abort_status_ = std::move(status);
    finish_requested_ = true;
    DropQueue();
    if (side_ == Side::kClient) {
      broken_ = reset_ = true;
      final_ = abort_status_;
      Shut();
      CloseIfOver();
    }
    ResumeIfPaused();
    if (writing_) return;
    writing_ = true;
  }
  Pump();
}

void Connection::End(absl::Status status) {
  absl::MutexLock lock(&mu_);
  if (over()) return;
  final_ = abort_status_.ok() ? std::move(status) : abort_status_;
  broken_ = true;
  DropQueue();
  Shut();
}

void Connection::Abandon() {
  Cancel();
  absl::MutexLock lock(&mu_);
  LeaveSink(this, &sink_, &closed_, &mu_);
}

bool Connection::Kill() {
  absl::MutexLock lock(&mu_);
  broken_ = true;
  reset_ = reset_ || !over();
  ResumeIfPaused();
  Shut();
  return !killed_.exchange(true);
}

void Connection::Shut() {
  if (socket_.is_open()) (void)::shutdown(socket_.native_handle(), SHUT_RDWR);
}

void Connection::CloseIfOver() {
  if (!over() || delivering_ || telling_ || closing_) return;
  closing_ = true;
  endpoint_.queue->Post(&close_);
}

void Connection::OnClose(error_code, size_t) {
  const std::shared_ptr<Connection> self = shared_from_this();
  StreamSink* sink = nullptr;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    sink = std::exchange(sink_, nullptr);
    status = *final_;
  }
  if (sink != nullptr) {
    const SinkScope scope(this);
    sink->OnClosed(std::move(status));
  }
  OnCoreClosed();
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  ReleaseIfOver();
}

void Connection::ReleaseIfOver() {
  {
    absl::MutexLock lock(&mu_);
    if (!closed_ || reading_ || writing_ || released_) return;
    released_ = true;
    error_code ignored;
    if (reset_) socket_.set_option(asio::socket_base::linger(true, 0), ignored);
    socket_.close(ignored);
  }
  owner_->Ended(this);
}

void Connection::Tick() {
  bool kill = false;
  bool give = false;
  {
    absl::MutexLock lock(&mu_);
    if (released_) return;
    const bool sent = sent_.exchange(false);
    // It takes no reply: it has as long as a peer of a stream.
    const bool stuck = paused_ && answers_calls() && !sent;
    const int lost_ticks = stuck ? kLostTicks : lost_ticks_.load();
    if (!waiting_.load() && established_.load() && !stuck) {
      silent_ticks_.store(0);
    } else if (silent_ticks_.fetch_add(1) + 1 >= lost_ticks && !over()) {
      lost_why_ = absl::StrCat("no sign of life for ", lost_ticks * endpoint_.limits.keepalive_ms / 2, " ms");
      kill = true;
    }
    // The peer has so much time to take our last words, and to go.
    if (over() || !abort_status_.ok()) kill = kill || ++ending_ticks_ > kLostTicks;
    give = !sent && give_life_.load() && !writing_;
  }
  if (kill) {
    Kill();
  } else if (give) {
    Enqueue(Pack(PacketType::kAlive, absl::StatusCode::kOk, {}));
  }
}

}  // namespace gradwire::transport::tcp
