// See tellers.h.
#include "server/norms/tellers.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"

namespace gradwire {

Tellers::~Tellers() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    work_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

absl::Status Tellers::Add(Telling* telling) {
  absl::MutexLock lock(&mu_);
  if (threads_.empty()) GW_RETURN_IF_ERROR(StartOne());
  entries_.push_back({telling});
  return absl::OkStatus();
}

void Tellers::Remove(Telling* telling) {
  absl::MutexLock lock(&mu_);
  if (Entry* const entry = Find(telling)) entry->leaving = true;
  for (Entry* entry = Find(telling); entry != nullptr; entry = Find(telling)) {
    if (entry->running == 0) {
      entries_.erase(entries_.begin() + (entry - entries_.data()));
      return;
    }
    left_.Wait(&mu_);
  }
}

void Tellers::Wake() {
  absl::MutexLock lock(&mu_);
  LookForWork();
}

void Tellers::LookForWork() {
  if (idle_ > 0) {
    work_.Signal();
  } else if (threads_.size() < kThreads) {
    StartOne().IgnoreError();  // then those that are there come to it
  }
}

size_t Tellers::threads() const {
  absl::MutexLock lock(&mu_);
  return threads_.size();
}

absl::Status Tellers::StartOne() {
  absl::StatusOr<std::thread> thread = StartThread("telling norms", [this] { Run(); });
  if (!thread.ok()) return thread.status();
  threads_.push_back(*std::move(thread));
  return absl::OkStatus();
}

Tellers::Entry* Tellers::Find(const Telling* telling) {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.telling == telling; });
  return at == entries_.end() ? nullptr : &*at;
}

std::optional<Tellers::Work> Tellers::TakeWork(absl::Time* due) {
  const absl::Time now = absl::Now();
  *due = absl::InfiniteFuture();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const size_t at = (turn_ + i) % entries_.size();
    Entry& entry = entries_[at];
    if (entry.leaving) continue;
    const bool unproven = unproven_ < kUnproven && entry.unproven < kUnprovenOfOne;
    const Telling::Next next = entry.telling->TakeNext(unproven, now);
    *due = std::min(*due, next.due);
    if (!next.to) continue;
    turn_ = at + 1;
    ++entry.running;
    if (!next.proven) ++entry.unproven, ++unproven_;
    return Work{entry.telling, *next.to, next.proven};
  }
  return std::nullopt;
}

void Tellers::Run() {
  absl::MutexLock lock(&mu_);
  while (!stopped_) {
    absl::Time due;
    const std::optional<Work> work = TakeWork(&due);
    if (!work) {
      ++idle_;
      work_.WaitWithDeadline(&mu_, due);
      --idle_;
      continue;
    }
    LookForWork();  // for what there is beside it, while this thread is in a call
    mu_.Unlock();
    work->telling->Tell(work->to);
    mu_.Lock();
    Entry* const entry = Find(work->telling);
    --entry->running;
    if (!work->proven) --entry->unproven, --unproven_;
    if (entry->leaving) left_.SignalAll();
  }
}

}  // namespace gradwire
