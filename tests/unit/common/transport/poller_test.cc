// A pool of completion threads: what it measures, and that sinks which wait for each other all get one.
#include "common/transport/poller.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {
namespace {

// Completions in the order in which they were posted.
class PostedQueue final : public CompletionQueue {
 public:
  void Post(Completion* completion) {
    absl::MutexLock lock(&mu_);
    posted_.push_back(completion);
  }
  Got Next(Event* event) override {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &PostedQueue::Ready));
    return Take(event);
  }
  Got TryNext(Event* event) override {
    absl::MutexLock lock(&mu_);
    return Ready() ? Take(event) : Got::kNothing;
  }
  void Shutdown() override {
    absl::MutexLock lock(&mu_);
    over_ = true;
  }

 private:
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return over_ || !posted_.empty(); }
  Got Take(Event* event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (posted_.empty()) return Got::kEnd;
    *event = {posted_.front(), true};
    posted_.pop_front();
    return Got::kCompletion;
  }

  absl::Mutex mu_;
  std::deque<Completion*> posted_ ABSL_GUARDED_BY(mu_);
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

// A sink that returns when as many are inside as wait for each other.
class MeetingSink final : public Completion {
 public:
  MeetingSink(absl::BlockingCounter* arrived, absl::BlockingCounter* left) : arrived_(*arrived), left_(*left) {}
  void Run(bool) override {
    {
      const SinkScope scope(this);
      arrived_.DecrementCount();
      while (!met_.load()) std::this_thread::yield();
    }
    left_.DecrementCount();
  }
  void LetGo() { met_ = true; }

 private:
  absl::BlockingCounter& arrived_;
  absl::BlockingCounter& left_;
  std::atomic<bool> met_ = false;
};

TEST(Poller, SinksThatWaitForEachOtherAllGetAThread) {
  constexpr int kSinks = 5;
  PostedQueue queue;
  absl::BlockingCounter arrived(kSinks);
  absl::BlockingCounter left(kSinks);
  std::vector<std::unique_ptr<MeetingSink>> sinks;
  Poller poller(&queue, 0);
  for (int i = 0; i < kSinks; ++i) {
    sinks.push_back(std::make_unique<MeetingSink>(&arrived, &left));
    queue.Post(sinks.back().get());
  }
  arrived.Wait();
  for (auto& sink : sinks) sink->LetGo();
  left.Wait();
}

// Times that threads of this process, but this one, have blocked, by thread.
std::map<std::string, uint64_t> TimesBlocked() {
  std::map<std::string, uint64_t> times;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream status(task.path() / "status");
    for (std::string word; status >> word;)
      if (word == "voluntary_ctxt_switches:") status >> times[task.path().filename()];
  }
  return times;
}

class CountedSink final : public Completion {
 public:
  void Run(bool) override { ++runs; }
  std::atomic<int> runs = 0;
};

TEST(Poller, SingleCompletionsLetItsKeeperSleep) {
  constexpr int kCompletions = 10;
  PostedQueue queue;
  CountedSink sink;
  Poller poller(&queue, 0);
  const auto before = TimesBlocked();
  for (int i = 0; i < kCompletions; ++i) {
    queue.Post(&sink);
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(sink.runs, kCompletions);
  uint64_t blocked = 0;
  for (const auto& [thread, times] : TimesBlocked())
    if (const auto it = before.find(thread); it != before.end()) blocked += times - it->second;
  EXPECT_LE(blocked, 8u * kCompletions) << "a look every two milliseconds would be 25 each";
}

TEST(Poller, ItsKeeperLooksLessOftenWhereAThreadWaits) {
  PostedQueue queue;
  CountedSink sink;
  Poller poller(&queue, 0);
  const auto before = TimesBlocked();
  const absl::Time began = absl::Now();
  while (absl::Now() - began < absl::Milliseconds(400)) {
    queue.Post(&sink);
    absl::SleepFor(absl::Milliseconds(1));
  }
  const double looks = absl::FDivDuration(absl::Now() - began, absl::Milliseconds(2));
  uint64_t keeper = UINT64_MAX;  // the pool's thread blocks once for each completion
  for (const auto& [thread, times] : TimesBlocked())
    if (const auto it = before.find(thread); it != before.end()) keeper = std::min(keeper, times - it->second);
  EXPECT_LE(static_cast<double>(keeper), looks / 2) << "of a look every two milliseconds";
}

TEST(Poller, ItsKeeperIsWokenForSinksThatBlock) {
  PostedQueue queue;
  Poller poller(&queue, 0);
  absl::SleepFor(absl::Milliseconds(50));  // it rests
  for (int round = 0; round < 3; ++round) {
    absl::BlockingCounter arrived(2);
    absl::BlockingCounter left(2);
    MeetingSink first(&arrived, &left), second(&arrived, &left);
    queue.Post(&first);
    absl::SleepFor(absl::Milliseconds(20));
    queue.Post(&second);
    arrived.Wait();
    first.LetGo();
    second.LetGo();
    left.Wait();
    absl::SleepFor(absl::Milliseconds(20));
  }
}

TEST(SinkLoad, TellsTheBusiestStreamAndBeginsAnew) {
  const int a = 0;
  const int b = 0;
  SinkLoad load;
  load.Add(&a, 30);
  load.Add(&b, 50);
  load.Add(&a, 40);
  const SinkLoad::Spent spent = load.Take();
  EXPECT_EQ(spent.all_ns, 120);
  EXPECT_EQ(spent.busiest_ns, 70);
  EXPECT_EQ(load.Take().all_ns, 0);
}

TEST(SinkLoad, CountsTheOutermostSinkOfAThread) {
  SinkLoad load;
  const int outer = 0;
  const int inner = 0;
  std::thread([&] {
    SinkScope::CountInto(&load);
    const SinkScope first(&outer);
    const SinkScope second(&inner);
    EXPECT_TRUE(SinkScope::Of(&outer));
    EXPECT_TRUE(SinkScope::Of(&inner));
  }).join();
  const SinkLoad::Spent spent = load.Take();
  EXPECT_EQ(spent.all_ns, spent.busiest_ns);
}

}  // namespace
}  // namespace gradwire::transport
