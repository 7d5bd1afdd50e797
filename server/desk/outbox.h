// The sending end of one server-side stream, safe to use from any thread also after the stream has closed.
// Streams must not be touched after OnClosed has returned (transport.h), while updates are published by whichever
// thread closed a bucket: Close waits for the sends that are running and turns later ones into errors.
// Any thread may publish, also one that serves somebody else's call or ends leases, so a peer that does not read must
// not hold it: Send never blocks, on whatever thread. What may be queued is bounded by who asks: a stream is read no
// further once its window is full, and a worker's answers count against its UnsentBudget.
#pragma once

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/transport.h"
#include "server/desk/unsent_budget.h"

namespace gradwire {

// Thread-safe. Shared by the stream's sink and by the buckets whose answers it waits for.
class Outbox {
 public:
  explicit Outbox(std::shared_ptr<transport::Stream> stream) : stream_(std::move(stream)) {}

  // Never blocks. Errors: Cancelled once closed; those of Stream::Send.
  absl::Status Send(transport::Message message);
  // Waits while the stream's window is full: for threads that serve this stream alone.
  absl::Status SendWhenRoom(transport::Message message);
  // Where the answers of this stream count, together with others of its worker. Before it is shared.
  void CountInto(std::shared_ptr<UnsentBudget> unsent) { unsent_ = std::move(unsent); }
  const std::shared_ptr<UnsentBudget>& unsent() const { return unsent_; }  // null: they are not counted
  // Held by who sends an answer in several messages: those of another answer must not come between them. Sends do not
  // wait, so it is held for as long as they take.
  absl::Mutex& one_answer() ABSL_LOCK_RETURNED(one_answer_) { return one_answer_; }
  // Ends the stream with `status`; what was sent before is still delivered.
  void Finish(absl::Status status);
  // Ends the stream at once, also one that was finished and whose peer does not read what is still to be sent.
  void Cancel();
  // Called from OnClosed. Returns when no other thread uses the stream.
  void Close();
  // The same, and lets go of the stream: for streams that do not outlive what they were opened with.
  void Release();

 private:
  bool Enter();
  void Exit();

  std::shared_ptr<transport::Stream> stream_;  // constant until nobody can use it
  std::shared_ptr<UnsentBudget> unsent_;       // constant once shared
  absl::Mutex one_answer_ ABSL_ACQUIRED_BEFORE(mu_);
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  int users_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gradwire
