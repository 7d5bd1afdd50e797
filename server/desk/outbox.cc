// Use-after-close protection of one stream; see outbox.h.
#include "server/desk/outbox.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "common/transport/sink_scope.h"

namespace gradwire {

bool Outbox::Enter() {
  absl::MutexLock lock(&mu_);
  if (closed_ || finished_) return false;
  ++users_;
  return true;
}

void Outbox::Exit() {
  absl::MutexLock lock(&mu_);
  --users_;
}

absl::Status Outbox::Send(transport::Message message) {
  const transport::SinkScope never_block(this);  // inside a sink sends never block (transport.h)
  return SendWhenRoom(std::move(message));
}

absl::Status Outbox::SendWhenRoom(transport::Message message) {
  if (!Enter()) return absl::CancelledError("the stream is closed");
  const absl::Cleanup exit = [this] { Exit(); };  // also where memory runs out
  return stream_->Send(std::move(message));
}

void Outbox::Finish(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || finished_) return;
    finished_ = true;
    ++users_;
  }
  const absl::Cleanup exit = [this] { Exit(); };
  stream_->Finish(std::move(status));
}

void Outbox::Cancel() {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    ++users_;
  }
  const absl::Cleanup exit = [this] { Exit(); };
  stream_->Cancel();
}

void Outbox::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
  mu_.Await(absl::Condition(
      +[](int* users) { return *users == 0; }, &users_));
}

void Outbox::Release() {
  Close();
  stream_.reset();
}

}  // namespace gradwire
