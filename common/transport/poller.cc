// See poller.h.
#include "common/transport/poller.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {

Poller::Poller(CompletionQueue* queue, TimeNs spin_ns) : queue_(queue), spin_ns_(spin_ns) {
  keeper_ = std::thread([this] { Keep(); });
  absl::MutexLock lock(&mu_);
  Spawn();
  if (running_ != 0) return;
  draining_.store(true);
  mu_.Unlock();
  keeper_.join();
  mu_.Lock();
  throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again), "a transport's thread");
}

Poller::~Poller() {
  {
    absl::MutexLock lock(&mu_);
    draining_.store(true);
  }
  keeper_.join();  // from here on no thread is added
  queue_->Shutdown();
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    threads.swap(threads_);
    if (!inside_) turn_.Signal();
  }
  for (std::thread& thread : threads) thread.join();
}

void Poller::Spawn() {
  // Threads that ended are joined here: they only have to return.
  for (std::thread::id id : ended_) {
    auto it = std::find_if(threads_.begin(), threads_.end(), [id](const std::thread& t) { return t.get_id() == id; });
    it->join();
    threads_.erase(it);
  }
  ended_.clear();
  if (running_ == kMaxThreads) return;
  try {
    ended_.reserve(threads_.size() + 1);  // whoever ends says so without memory
    threads_.emplace_back([this] { Loop(); });
    ++running_;
    waiting_.fetch_add(1);  // on behalf of the new thread
  } catch (const std::exception&) {
    // For want of threads or memory: the ones that run go on, and a later look tries again.
  }
}

void Poller::Loop() {
  SinkScope::CountInto(&load_);
  SpinBudget spin(spin_ns_);
  CompletionQueue::Event event;
  bool answering = false;  // a message so small that the time it takes is that of waking threads
  while (Enter()) {
    const bool got = Next(answering ? &spin : nullptr, &event);
    Leave(got);
    if (!got) return;
    waiting_.fetch_sub(1);
    events_.fetch_add(1);  // before the look at resting_: the keeper looks at them the other way round
    if (resting_.load()) WakeKeeper();
    const TimeNs begin = spin_ns_ != 0 ? SteadyClock().Now() : 0;
    Run(event);
    answering = spin_ns_ != 0 && SteadyClock().Now() - begin < spin_ns_ / 2;
    if (callers_.load()) Rest();
    // A surplus thread ends only while another one waits.
    int surplus = surplus_.load();
    if (surplus > 0 && !draining_.load() && waiting_.load() > 0 &&
        surplus_.compare_exchange_strong(surplus, surplus - 1)) {
      absl::MutexLock lock(&mu_);
      --running_;
      ended_.push_back(std::this_thread::get_id());
      if (!inside_) turn_.Signal();
      return;
    }
    waiting_.fetch_add(1);
  }
}

bool Poller::Enter() {
  absl::MutexLock lock(&mu_);
  ++reserve_;
  while (inside_ && !over_) turn_.Wait(&mu_);
  --reserve_;
  inside_ = true;
  ++entries_;
  return !over_;
}

void Poller::Leave(bool got) {
  absl::MutexLock lock(&mu_);
  inside_ = false;
  if (!got) {
    over_ = true;
    turn_.SignalAll();
  } else if (draining_.load() && reserve_ > 0) {
    turn_.Signal();  // nobody looks any more
  }
}

bool Poller::Next(SpinBudget* spin, CompletionQueue::Event* event) {
  using Got = CompletionQueue::Got;
  if (spin == nullptr) return queue_->Next(event) == Got::kCompletion;
  const TimeNs begin = SteadyClock().Now();
  Got got = Got::kNothing;
  SpinBudget::Spin(spin->budget_ns(), [&] {
    got = queue_->TryNext(event);
    return got != Got::kNothing;
  });
  if (got == Got::kNothing) got = queue_->Next(event);
  spin->Note(SteadyClock().Now() - begin);
  return got == Got::kCompletion;
}

void Poller::Run(const CompletionQueue::Event& event) {
  // Operations catch what they can undo. What is left here costs the call or stream that it happened to, which ends by
  // its signs of life, not the process.
  CatchExhausted("a completion", [&] {
    event.completion->Run(event.ok);
    return absl::OkStatus();
  }).IgnoreError();
}

void Poller::RunReady() {
  polls_.fetch_add(1);
  if (!callers_.load()) {
    callers_.store(true);
    if (resting_.load()) WakeKeeper();  // it is who hands back for callers that forget
  }
  CompletionQueue::Event event;
  if (queue_->TryNext(&event) != CompletionQueue::Got::kCompletion) return;
  events_.fetch_add(1);
  Run(event);
}

void Poller::HandBack() {
  if (!callers_.load()) return;
  absl::MutexLock lock(&mu_);
  callers_.store(false);
}

void Poller::Rest() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &Poller::MayRun));
}

void Poller::WakeKeeper() {
  absl::MutexLock lock(&mu_);
  resting_.store(false);
}

void Poller::Keep() {
  const auto draining = [this] { return draining_.load(); };
  const absl::Condition wanted(this, &Poller::KeeperWanted);
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (resting_.load()) {
        mu_.Await(wanted);
        look_ms_ = kLookMs;
        BeginMeasuring();
      }
      if (mu_.AwaitWithTimeout(absl::Condition(&draining), absl::Milliseconds(look_ms_))) return;
    }
    if (!Look()) {
      absl::MutexLock lock(&mu_);
      resting_.store(true);
      // An event between the look and the store: look again.
      if (events_.load() != seen_events_) resting_.store(false);
    }
  }
}

bool Poller::Look() {
  if (const uint64_t polls = polls_.load(); callers_.load()) {
    if (polls == seen_polls_) HandBack();
    seen_polls_ = polls;
    stuck_looks_ = 0;
    look_ms_ = kLookMs;
    return true;
  }
  bool attended = false;
  {
    absl::MutexLock lock(&mu_);
    attended = inside_;
    if (!inside_ && reserve_ > 0 && (parallel_ || entries_ == seen_entries_)) turn_.Signal();
    seen_entries_ = entries_;
  }
  look_ms_ = attended ? std::min(2 * look_ms_, kLongestLookMs) : kLookMs;
  const uint64_t events = events_.load();
  const int waiting = waiting_.load();
  stuck_looks_ = waiting <= 0 && events == seen_events_ ? stuck_looks_ + 1 : 0;
  const bool idle = events == seen_events_;
  seen_events_ = events;
  if (stuck_looks_ >= kStuckLooks) {
    absl::MutexLock lock(&mu_);
    surplus_.store(0);
    Spawn();
    stuck_looks_ = kStuckLooks - 1;  // one more at every look while nobody waits
  }
  if (++looks_ == kLoadLooks) Measure();
  return !attended || !idle;
}

SinkLoad::Spent Poller::BeginMeasuring() {
  looks_ = 0;
  measured_ = {running_, SteadyClock().Now(), CpuNs()};
  return load_.Take();
}

void Poller::Measure() {
  absl::MutexLock lock(&mu_);
  const Load last = measured_;
  const SinkLoad::Spent spent = BeginMeasuring();
  if (last.threads != running_) {
    spare_looks_ = 0;
    return;
  }
  const double time = static_cast<double>(measured_.at_ns - last.at_ns);
  const double cpu = static_cast<double>(measured_.cpu_ns - last.cpu_ns) / time;
  const double in_sinks = static_cast<double>(spent.all_ns) / time;
  // How many threads could be inside sinks all the time.
  const double streams =
      static_cast<double>(spent.all_ns) / static_cast<double>(std::max<int64_t>(spent.busiest_ns, 1));
  parallel_ = streams > 1 + kOther;
  const bool full = cpu > kFull * running_ && in_sinks > kInSinks * running_ && streams > running_ + kOther;
  const bool blocked = in_sinks > kFull * running_;
  if (full || blocked) {
    surplus_.store(0);
    Spawn();
  }
  spare_looks_ = running_ > 1 && cpu < kFull * (running_ - 1) ? spare_looks_ + kLoadLooks : 0;
  if (spare_looks_ >= kSpareLooks) {
    surplus_.store(1);
    spare_looks_ = 0;
  }
}

int64_t Poller::CpuNs() const {
  int64_t sum = 0;
  for (const std::thread& thread : threads_) {
    clockid_t clock;
    timespec spent{};
    // Fails for a thread that has ended.
    if (pthread_getcpuclockid(const_cast<std::thread&>(thread).native_handle(), &clock) != 0) continue;
    if (clock_gettime(clock, &spent) == 0) sum += spent.tv_sec * 1'000'000'000 + spent.tv_nsec;
  }
  return sum;
}

}  // namespace gradwire::transport
