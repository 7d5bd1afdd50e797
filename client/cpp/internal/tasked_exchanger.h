// What both exchanges share: gradients that get ready become tasks, which threads of the exchange work on or, where
// waking one costs more than its work, callers, one at a time; and how an exchange fails.
#pragma once

#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/coalescing.h"
#include "client/cpp/internal/exchanger.h"
#include "client/cpp/internal/round_input.h"
#include "client/cpp/internal/slice_work.h"
#include "client/cpp/internal/task_queue.h"
#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "common/trace/recorder.h"

namespace gradwire::client {

// Jobs with more elements than this have threads: 64 KiB of float32 are encoded about as fast as a thread wakes up.
inline constexpr uint64_t kThreadsAbove = 16384;

// Thread-safety as Session says.
template <typename Task>
class TaskedExchanger : public Exchanger {
 public:
  absl::Status Ready(uint32_t tensor, const GivenGradient& gradient) final {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok()) return Failure();
    if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
    const bool had_all = ready_.All();  // another one has no elements
    GW_RETURN_IF_ERROR(ready_.Note(tensor, gradient));
    if (!threads_) {
      AddTask(TaskOf(tensor, gradient));
      RunTasksInline();
      return absl::OkStatus();
    }
    if (ready_.order().size() == 1) coalescing_.FirstReady(clock_.Now());
    gathered_.push_back(TaskOf(tensor, gradient));
    gathered_bytes_ += ready_.bytes(tensor);
    if (ready_.All() && !had_all) coalescing_.LastReady(clock_.Now());
    if (ready_.All() || waiters_ > 0 || !coalescing_.MayWait(gathered_bytes_, ready_.missing_bytes())) AddGathered();
    return absl::OkStatus();
  }

  // Without threads the caller goes on with what waited for room; with threads they look again, for the lock was taken.
  void OnRoom(uint32_t /*shard*/) final {
    absl::MutexLock lock(&mu_);
    RunTasksInline();
  }

  bool IsReady(uint32_t tensor) const final {
    absl::MutexLock lock(&mu_);
    return ready_.Has(tensor);
  }

  bool HasFailed() final {
    absl::MutexLock lock(&mu_);
    return !failed_.ok();
  }

  void AddStats(SessionStats* stats) const final {
    constexpr double kSeconds = 1e-9;
    absl::MutexLock lock(&mu_);
    stats->steps = counters_.steps;
    stats->skipped_rounds = counters_.skipped;
    stats->nonfinite_rounds = counters_.nonfinite;
    stats->selected_elements = counters_.selected;
    stats->deferred_elements = counters_.deferred;
    stats->sanitized_elements = counters_.sanitized;
    stats->not_included_frames = counters_.not_included;
    stats->encode_seconds = static_cast<double>(counters_.encode_ns) * kSeconds;
    stats->apply_seconds = static_cast<double>(counters_.apply_ns) * kSeconds;
    stats->wait_seconds = static_cast<double>(counters_.wait_ns) * kSeconds;
  }

 protected:
  struct Counters {
    uint64_t steps = 0, skipped = 0, nonfinite = 0, selected = 0, deferred = 0, not_included = 0, sanitized = 0;
    TimeNs encode_ns = 0, apply_ns = 0, wait_ns = 0;
  };

  // `links`: per shard. `encode_threads`: of a job that has threads; gradients on a device have one.
  TaskedExchanger(const SliceContext& slices, std::vector<FrameLink*> links, uint32_t encode_threads,
                  const Coalescing& coalescing)
      : trace_(slices.trace),
        threads_(slices.job->elements() > kThreadsAbove || !slices.gradients->memory().on_host()),
        layout_(*slices.layout),
        links_(std::move(links)),
        turns_(*slices.job, *slices.layout),
        ready_(slices.job),
        countdown_(*slices.job, *slices.layout),
        coalescing_(coalescing),
        encode_threads_(slices.gradients->memory().on_host() ? encode_threads : 1) {}

  // The last thing of a constructor, and of Stop, once stop_ is set.
  void StartTasks() {
    for (uint32_t i = 0; threads_ && i < encode_threads_; ++i) encoders_.emplace_back([this] { TaskLoop(); });
  }
  void EndTasks() {
    for (std::thread& encoder : encoders_) encoder.join();
    encoders_.clear();
  }

  // A round begins, whose gradients will get ready, or has none. `all_acknowledged`: the frames of those before.
  void OpenReady(bool all_acknowledged, bool all = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    ready_.Open(all);
    coalescing_.RoundBegan(clock_.Now(), all_acknowledged);
  }
  // While one lives, someone waits for what can only be once all that is ready is sent: no gradient waits for others.
  class Waiter {
   public:
    explicit Waiter(TaskedExchanger* exchanger) ABSL_EXCLUSIVE_LOCKS_REQUIRED(exchanger->mu_) : exchanger_(*exchanger) {
      ++exchanger_.waiters_;
      exchanger_.AddGathered();
    }
    ~Waiter() ABSL_NO_THREAD_SAFETY_ANALYSIS { --exchanger_.waiters_; }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

   private:
    TaskedExchanger& exchanger_;
  };

  // Why it has failed, once nothing is written to the caller's tensors any more. Only where it has.
  virtual absl::Status Failure() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return failed_; }
  virtual Task TaskOf(uint32_t tensor, const GivenGradient& gradient) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  virtual TaskPlace PlaceOf(const Task& task) const = 0;
  virtual void Work(const Task& task) ABSL_LOCKS_EXCLUDED(mu_) = 0;

  void AddTask(Task task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const TaskPlace place = PlaceOf(task);
    tasks_.Add(place, std::move(task));
  }
  // Of a frame of this slice that is to be encoded, or of what else concerns it.
  TaskPlace PlaceOfSlice(TaskPlace::Rank rank, uint32_t slice) const {
    return {rank, TurnOf(slice), At(slice).shard, slice, rank == TaskPlace::Rank::kEncode};
  }

  // Without threads: all tasks that may begin, unless another caller is at them and will see the new ones. Releases the
  // lock while it is at one.
  void RunTasksInline() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (threads_ || Encoding()) return;
    while (!stop_ && RunTask()) {
    }
  }
  // Someone is at a task, and may read the caller's gradients.
  bool Encoding() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tasks_.at_work() > 0; }

  void Fail(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    FailLocked(status);
  }
  void FailLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (failed_.ok()) failed_ = status;
  }
  // Of the round: its end returns the first one.
  void NoteError(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (round_error_.ok()) round_error_ = status;
  }

  TraceSubject SubjectOf(v1::TraceStage stage, uint64_t round, uint32_t slice, uint64_t bytes = 0) const {
    return {stage, round, At(slice).bucket, At(slice).shard, 0, bytes};
  }
  const BucketLayout& At(uint32_t slice) const { return layout_.slices()[slice]; }
  uint32_t TurnOf(uint32_t slice) const { return turns_.of_bucket[At(slice).job_bucket]; }
  FrameLink* LinkOf(uint32_t slice) const { return links_[At(slice).shard]; }
  absl::Status CheckBucket(uint32_t job_bucket) const {
    if (job_bucket < layout_.bucket_count()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", job_bucket, "; the job has ", layout_.bucket_count(), " buckets"));
  }
  // What a shard calls a bucket; none: it has none of this number.
  std::optional<uint32_t> SliceOf(uint32_t bucket, uint32_t shard) const {
    if (bucket >= layout_.bucket_count(shard)) return std::nullopt;
    return layout_.slice_of(bucket, shard);
  }
  // An instant.
  void Trace(const TraceSubject& subject) const {
    if (trace_ != nullptr) trace_->Note(subject);
  }

  TraceRecorder* const trace_;  // may be null
  const bool threads_;
  const Layout& layout_;
  const std::vector<FrameLink*> links_;
  const Turns turns_;
  SteadyClock clock_;

  mutable absl::Mutex mu_;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  absl::Status round_error_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool round_open_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<float> learning_rates_ ABSL_GUARDED_BY(mu_);
  ReadyTensors ready_ ABSL_GUARDED_BY(mu_);
  BucketCountdown countdown_ ABSL_GUARDED_BY(mu_);
  TaskQueue<Task> tasks_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);
  Coalescing coalescing_ ABSL_GUARDED_BY(mu_);

 private:
  void AddGathered() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (Task& task : gathered_) AddTask(std::move(task));
    gathered_.clear();
    gathered_bytes_ = 0;
  }

  void TaskLoop() {
    const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_ || tasks_.CanBegin(HasRoom()); };
    absl::MutexLock lock(&mu_);
    for (;;) {
      mu_.Await(absl::Condition(&work));
      if (stop_) return;
      RunTask();
    }
  }

  // The next task that may begin; false: there is none. Releases the lock while it is worked on.
  bool RunTask() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto next = tasks_.Begin(HasRoom());
    if (!next) return false;
    if (failed_.ok()) {  // else the caller's gradients must not be read any more
      mu_.Unlock();
      Work(next->task);
      mu_.Lock();
    }
    tasks_.End(next->place);
    return true;
  }

  auto HasRoom() const {
    return [this](uint32_t shard) { return links_[shard]->HasRoom(); };
  }

  const uint32_t encode_threads_;
  std::vector<std::thread> encoders_;
  std::vector<Task> gathered_ ABSL_GUARDED_BY(mu_);  // of tensors that are ready, and wait for others
  uint64_t gathered_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t waiters_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gradwire::client
