// Group commit, the interval of syncs, degraded durability and retries; see journal.h.
#include "server/journal/journal.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/time/time.h"
#include "common/base/failpoint.h"

namespace gradwire::journal {
namespace {

constexpr TimeNs kNever = std::numeric_limits<TimeNs>::max();

}  // namespace

Journal::Journal(JournalOptions options, std::unique_ptr<JournalWriter> writer, Clock* clock)
    : options_(std::move(options)), clock_(clock), writer_(std::move(writer)), retry_ns_(options_.first_retry_ns) {
  PublishStatus(0);
}

Journal::~Journal() { Stop(); }

void Journal::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Journal::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void Journal::Append(Record record, std::function<void()> visible) {
  absl::MutexLock lock(&mu_);
  if (stop_) return;
  queue_.push_back({std::move(record), std::move(visible)});
  wake_.Signal();
}

void Journal::Run() {
  for (;;) {
    const TimeNs next = Pump();
    absl::MutexLock lock(&mu_);
    if (queue_.empty() && keep_from_ == 0 && !stop_) {
      const TimeNs wait = next == kNever ? kNever : next - clock_->Now();
      if (wait > 0) wake_.WaitWithTimeout(&mu_, wait == kNever ? absl::InfiniteDuration() : absl::Nanoseconds(wait));
    }
    if (stop_ && queue_.empty()) break;
  }
  if (degraded()) writer_->Heal().IgnoreError();
  if (!degraded()) writer_->Sync().IgnoreError();
}

TimeNs Journal::Pump() {
  const TimeNs now = clock_->Now();
  std::vector<Entry> taken;
  {
    absl::MutexLock lock(&mu_);
    taken.swap(queue_);
    cut_to_ = std::max(cut_to_, std::exchange(keep_from_, 0));
    if (hole_end_ != 0 && snapshot_version_ >= hole_end_) hole_end_ = 0;
  }
  const uint64_t records = taken.size();
  const bool retry = degraded() && now >= retry_at_;
  if (retry) writer_->Heal().IgnoreError();
  Write(std::move(taken), now);
  if (retry || degraded() != was_degraded_) NoteHealth(now);
  if (cut_to_ != 0 && !degraded()) Cut();
  PublishStatus(records);
  // A server that was replaced shows nothing any more.
  if (!degraded() || (options_.on_failure == OnFailure::kContinue && !writer_->fenced())) {
    const std::vector<Visible> met = std::move(waiting_);
    waiting_.clear();
    for (const Visible& visible : met) visible();
  }
  return NextTurn();
}

void Journal::Cut() {
  GW_FAILPOINT("journal.cut.before");
  absl::Status cut = writer_->Sync();  // what was kept of the records that go
  if (degraded()) return;              // until it is well again: the next snapshot may be long to come
  if (cut.ok()) cut = writer_->Cut(cut_to_);
  cut_to_ = 0;
  GW_FAILPOINT("journal.cut.after");
  if (!cut.ok()) spdlog::warn("job {}: old journal segments stay: {}", options_.job, cut.ToString());
}

void Journal::Write(std::vector<Entry> taken, TimeNs now) {
  if (writer_->unsynced_bytes() == 0) next_sync_ = now + options_.sync_interval_ns;
  for (Entry& entry : taken) {
    writer_->Append(std::move(entry.record)).IgnoreError();  // the writer keeps it, and its status says why
    waiting_.push_back(std::move(entry.visible));
  }
  LimitBacklog();
  if (degraded() || writer_->unsynced_bytes() == 0) return;
  const bool due =
      options_.level == Level::kFsync || now >= next_sync_ || writer_->unsynced_bytes() > options_.unsynced_limit_bytes;
  if (!due) return;
  next_sync_ = now + options_.sync_interval_ns;
  if (writer_->Sync().ok()) {
    absl::MutexLock lock(&mu_);
    ++status_.syncs;
  }
}

void Journal::LimitBacklog() {
  if (!degraded() || writer_->unsynced_bytes() <= options_.backlog_limit_bytes) return;
  if (options_.on_failure == OnFailure::kWait) return;                     // bounded by the rounds that wait
  hole_end_ = std::max({hole_end_, writer_->backlog_end(), uint64_t{1}});  // 1: of initial parameters
  spdlog::error(
      "job {}: {} bytes of update frames could not be written and are given up; until a snapshot is taken, "
      "this shard cannot be recovered beyond them",
      options_.job, writer_->unsynced_bytes());
  writer_->DropBacklog();
}

void Journal::NoteHealth(TimeNs now) {
  if (!degraded()) {
    if (was_degraded_) {
      spdlog::info("job {}: the journal can be written again{}", options_.job,
                   hole_end_ == 0 ? "" : "; what was given up is made good by the snapshot that follows");
    }
    was_degraded_ = false;
    retry_ns_ = options_.first_retry_ns;
    return;
  }
  if (!was_degraded_) {
    absl::MutexLock lock(&mu_);
    ++status_.failures;
  }
  was_degraded_ = true;
  retry_at_ = now + retry_ns_;
  retry_ns_ = std::min(2 * retry_ns_, options_.last_retry_ns);
  for (const WarningLimiter::Count& more : warnings_.TakeEnded(now)) {
    spdlog::warn("job {}: {} more tries to write the journal failed within 10 s", options_.job, more.warnings);
  }
  if (!warnings_.Admit(writer_->status().code(), now)) return;
  spdlog::warn("job {}: the journal is degraded, {}: {}", options_.job,
               options_.on_failure == OnFailure::kWait ? "rounds wait" : "rounds go on without it",
               writer_->status().ToString());
}

void Journal::PublishStatus(uint64_t taken) {
  absl::MutexLock lock(&mu_);
  status_.degraded = degraded();
  status_.hole = hole_end_ != 0;
  status_.reason = std::string(writer_->status().message());
  status_.records += taken;
  status_.bytes = writer_->bytes();
  status_.backlog_bytes = degraded() ? writer_->unsynced_bytes() : 0;
  // What follows a hole is on disk, and no use before a snapshot is.
  if (hole_end_ == 0) status_.durable_versions = writer_->durable_versions();
}

TimeNs Journal::NextTurn() const {
  if (degraded()) return retry_at_;
  return writer_->unsynced_bytes() > 0 ? next_sync_ : kNever;
}

JournalStatus Journal::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void Journal::SnapshotTaken(uint64_t version, uint64_t keep_from) {
  absl::MutexLock lock(&mu_);
  snapshot_version_ = std::max(snapshot_version_, version);
  keep_from_ = std::max(keep_from_, keep_from);
  wake_.Signal();
}

}  // namespace gradwire::journal
