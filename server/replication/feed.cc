// See feed.h.
#include "server/replication/feed.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "server/replication/beat.h"
#include "server/replication/record_pieces.h"

namespace gradwire {
namespace {

constexpr uint64_t kNotCopied = std::numeric_limits<uint64_t>::max();

}  // namespace

// One job of this standby. Attached to the job's sink for as long as it is among the feed's taps.
class Feed::Tap final : public RecordFollower {
 public:
  Tap(Feed* feed, uint32_t number, JobRegistry::DurableJob job)
      : feed_(feed), number_(number), job_(std::move(job)), from_(job_.shard->bucket_count(), kNotCopied) {}

  const std::string& name() const override { return feed_->options_.name; }
  void Enqueue(const journal::Record& record) override { feed_->Enqueue(number_, record); }
  bool MayBeWaitedFor() const override { return feed_->options_.share->patience.MayBegin(feed_->clock_->Now()); }

  uint32_t number() const { return number_; }
  JobShard& shard() const { return *job_.shard; }
  ReplicatedSink& sink() const { return *job_.sink; }
  // Of whoever takes the turns: the state of `bucket` that was sent goes on with this round. What comes before it is in
  // there.
  void GoesOnFrom(uint32_t bucket, uint64_t round) { from_[bucket] = round; }
  bool Wants(const journal::Record& record) const { return record.round >= from_[record.bucket]; }

 private:
  Feed* const feed_;
  const uint32_t number_;
  const JobRegistry::DurableJob job_;
  std::vector<uint64_t> from_;
};

Feed::Feed(FeedOptions options, JobRegistry* registry, Clock* clock, std::shared_ptr<Outbox> out)
    : options_(std::move(options)), registry_(registry), clock_(clock), out_(std::move(out)), heard_(clock->Now()) {}

Feed::~Feed() { Stop(); }

absl::Status Feed::Start() {
  try {
    if (options_.thread) thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "this server has no thread for another standby: %s; raise what it may have, or --max-standbys is too large",
        error.what()));
  }
  spdlog::info("standby {} follows", options_.name);
  return absl::OkStatus();
}

void Feed::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
  DetachAll();
}

bool Feed::over() const {
  absl::MutexLock lock(&mu_);
  return stop_;
}

void Feed::Drop(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (stop_) return;
    stop_ = true;
    dropped_at_ = clock_->Now();
    wake_.Signal();
  }
  spdlog::warn("standby {} is dropped, rounds no longer wait for it: {}", options_.name, why.ToString());
  DetachAll();
  out_->Finish(why);
}

void Feed::DetachAll() {
  std::map<uint32_t, std::shared_ptr<Tap>> taps;
  {
    absl::MutexLock lock(&mu_);
    taps.swap(taps_);
    ClearQueue();
  }
  const TimeNs now = clock_->Now();
  bool waited_for = false;
  TimeNs held = 0;
  for (const auto& [number, tap] : taps) {
    waited_for = waited_for || tap->sink().WaitedFor(tap.get());
    if (const std::optional<TimeNs> since = tap->sink().WaitingSince(tap.get())) held = std::max(held, now - *since);
  }
  if (waited_for) {  // before rounds go on: the next one is judged by it
    const TimeNs since = in_sync_since_ != 0 ? in_sync_since_.load() : now;
    const TimeNs pause = options_.share->patience.Lost(now, since, held);
    spdlog::warn(
        "standby {} was waited for, at last for {} ms: rounds begin to wait for no standby during the next {} ms",
        options_.name, held / NsOfMs(1), pause / NsOfMs(1));
  }
  for (const auto& [number, tap] : taps) {
    if (tap->sink().InSync(tap.get())) {
      spdlog::warn("job {}: rounds go on without standby {}", tap->shard().job().spec().name(), options_.name);
    }
    tap->sink().Detach(tap.get());
  }
}

std::vector<std::shared_ptr<Feed::Tap>> Feed::Taps() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Tap>> taps;
  for (const auto& [number, tap] : taps_) taps.push_back(tap);
  return taps;
}

absl::Status Feed::OnRequest(const v1::FollowRequest& request) {
  heard_ = clock_->Now();
  for (const v1::Taken& taken : request.taken()) {
    std::shared_ptr<Tap> tap;
    {
      absl::MutexLock lock(&mu_);
      const auto it = taps_.find(taken.job());
      if (it == taps_.end()) continue;  // the job has gone meanwhile
      tap = it->second;
    }
    GW_ASSIGN_OR_RETURN(const bool came, tap->sink().Take(tap.get(), taken.bucket(), taken.version()));
    if (came) CameIntoSync(*tap);
  }
  return absl::OkStatus();
}

void Feed::CameIntoSync(const Tap& tap) {
  spdlog::info("job {}: standby {} is in sync", tap.shard().job().spec().name(), options_.name);
  TimeNs never = 0;
  in_sync_since_.compare_exchange_strong(never, clock_->Now());
  BeatSoon();
}

void Feed::BeatSoon() {
  absl::MutexLock lock(&mu_);
  beat_now_ = true;
  wake_.Signal();
}

void Feed::JobsChanged() {
  absl::MutexLock lock(&mu_);
  changed_ = true;
  wake_.Signal();
}

void Feed::Tick() {
  const TimeNs limit = clock_->Now() - NsOfMs(options_.timeout_ms);
  bool unread = false;
  {
    absl::MutexLock lock(&mu_);
    unread = dropped_at_ != 0 && dropped_at_ < limit;
  }
  if (unread) return out_->Cancel();
  if (const absl::Status keeps_up = KeepsUp(); !keeps_up.ok()) return Drop(keeps_up);
  if (heard_ < limit) {
    return Drop(absl::AbortedError(absl::StrFormat("nothing was heard of it for %d ms", options_.timeout_ms)));
  }
  for (const auto& tap : Taps()) {
    if (tap->sink().Reconsider(tap.get())) CameIntoSync(*tap);
    if (const auto since = tap->sink().WaitingSince(tap.get()); !since || *since >= limit) continue;
    return Drop(absl::AbortedError(absl::StrFormat("job '%s': it has not taken a record for %d ms",
                                                   tap->shard().job().spec().name(), options_.timeout_ms)));
  }
}

void Feed::Enqueue(uint32_t job, const journal::Record& record) {
  absl::MutexLock lock(&mu_);
  if (stop_ || overflowed_) return;
  const uint64_t bytes = HeldBytes(record);
  queue_bytes_ += bytes;
  const uint64_t all = options_.share->queued_bytes.fetch_add(bytes) + bytes;
  queue_.push_back({job, record});
  wake_.Signal();
  // Its thread may wait in Send for a standby that reads nothing: what is too much goes here, the rest is done by Tick.
  if (all <= options_.share->queue_limit_bytes) return;
  if (queue_bytes_ <= options_.share->queue_limit_bytes / options_.share->feeds) return;
  overflowed_ = true;
  ClearQueue();
}

void Feed::ClearQueue() {
  queue_.clear();
  options_.share->queued_bytes -= queue_bytes_;
  queue_bytes_ = 0;
}

absl::Status Feed::KeepsUp() const {
  absl::MutexLock lock(&mu_);
  if (!overflowed_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("it cannot keep up: more than its part of --standby-queue-bytes = %d waited to be sent",
                      options_.share->queue_limit_bytes));
}

void Feed::Run() {
  while (TryTurn()) {
    absl::MutexLock lock(&mu_);
    const TimeNs wait = next_beat_ - clock_->Now();
    if (!stop_ && Idle() && wait > 0) wake_.WaitWithTimeout(&mu_, absl::Nanoseconds(wait));
  }
}

TimeNs Feed::TakeTurn() {
  {
    absl::MutexLock lock(&mu_);
    if (stop_) return std::numeric_limits<TimeNs>::max();
    if (Idle() && clock_->Now() < next_beat_) return next_beat_;
  }
  return TryTurn() ? next_beat_ : std::numeric_limits<TimeNs>::max();
}

bool Feed::TryTurn() {
  const absl::Status status = CatchBadAlloc("a standby", [this] { return Turn(); });
  // Cancelled: the stream has closed, or it was stopped.
  if (!status.ok() && !absl::IsCancelled(status)) Drop(status);
  return status.ok();
}

bool Feed::Idle() const { return !changed_ && !beat_now_ && !overflowed_ && queue_.empty(); }

absl::Status Feed::Turn() {
  if (!greeted_) {
    v1::FollowMessage hello;
    hello.mutable_hello()->set_server_epoch(registry_->environment().epochs->now());
    hello.mutable_hello()->set_lineage_key(options_.lineage.key());
    GW_RETURN_IF_ERROR(Send(hello));
    greeted_ = true;
  }
  bool changed = false;
  {
    absl::MutexLock lock(&mu_);
    if (stop_) return absl::CancelledError("stopped");
    std::swap(changed, changed_);
  }
  GW_RETURN_IF_ERROR(KeepsUp());
  GW_RETURN_IF_ERROR(SendQueue());
  if (changed) GW_RETURN_IF_ERROR(Reconcile());
  bool beat = clock_->Now() >= next_beat_;
  {
    absl::MutexLock lock(&mu_);
    beat = std::exchange(beat_now_, false) || beat;
  }
  return beat || changed ? SendBeat() : absl::OkStatus();
}

absl::Status Feed::SendQueue() {
  for (;;) {
    Entry entry;
    std::shared_ptr<Tap> tap;
    {
      absl::MutexLock lock(&mu_);
      if (stop_) return absl::CancelledError("stopped");
      if (queue_.empty()) return absl::OkStatus();
      entry = std::move(queue_.front());
      queue_.pop_front();
      queue_bytes_ -= HeldBytes(entry.record);
      options_.share->queued_bytes -= HeldBytes(entry.record);
      const auto it = taps_.find(entry.job);
      if (it == taps_.end()) continue;
      tap = it->second;
    }
    if (tap->Wants(entry.record)) GW_RETURN_IF_ERROR(SendRecord(tap->number(), entry.record));
  }
}

absl::Status Feed::Reconcile() {
  const std::vector<JobRegistry::DurableJob> jobs = registry_->Durable();
  for (const auto& tap : Taps()) {
    const bool there =
        std::any_of(jobs.begin(), jobs.end(), [&](const auto& job) { return job.shard.get() == &tap->shard(); });
    if (there) continue;
    {
      absl::MutexLock lock(&mu_);
      taps_.erase(tap->number());
    }
    tap->sink().Detach(tap.get());
    v1::FollowMessage message;
    message.mutable_deleted()->set_job(tap->number());
    GW_RETURN_IF_ERROR(Send(message));
  }
  const auto known = Taps();
  for (const JobRegistry::DurableJob& job : jobs) {
    const bool begun =
        std::any_of(known.begin(), known.end(), [&](const auto& tap) { return &tap->shard() == job.shard.get(); });
    if (begun || !job.shard->HasParameters()) continue;
    uint32_t number = 0;
    {
      absl::MutexLock lock(&mu_);
      number = next_number_++;
    }
    GW_RETURN_IF_ERROR(Begin(number, job));
  }
  return absl::OkStatus();
}

absl::Status Feed::Begin(uint32_t number, const JobRegistry::DurableJob& job) {
  JobShard& shard = *job.shard;
  auto tap = std::make_shared<Tap>(this, number, job);
  {
    absl::MutexLock lock(&mu_);
    if (stop_) return absl::CancelledError("stopped");
    taps_[number] = tap;
  }
  const bool goes_on = GoOn(*tap, job);
  if (!goes_on) tap->sink().Attach(tap.get());
  bool stopped = false;
  {
    absl::MutexLock lock(&mu_);
    stopped = stop_;
  }
  if (stopped) {  // dropped meanwhile, before there was anything to detach
    tap->sink().Detach(tap.get());
    return absl::CancelledError("stopped");
  }
  v1::FollowMessage message;
  v1::FollowBegin& begin = *message.mutable_begin();
  begin.set_job(number);
  *begin.mutable_stored()->mutable_spec() = shard.job().spec();
  begin.mutable_stored()->set_shard_index(shard.shard_index());
  begin.mutable_stored()->set_shard_count(shard.layout().shard_count());
  begin.mutable_stored()->set_instance(shard.instance());
  begin.set_layout_digest(shard.layout().digest());
  begin.set_history(tap->sink().history());
  begin.set_goes_on(goes_on);
  GW_RETURN_IF_ERROR(Send(message));
  if (goes_on) return absl::OkStatus();  // its records are queued
  for (uint32_t b = 0; b < shard.bucket_count(); ++b) {
    const absl::StatusOr<std::vector<journal::Record>> copy = shard.log().CopyBucket(b);
    if (!copy.ok()) {  // a job that stopped, or was deleted just now; it stays behind, and the others go on
      spdlog::warn("job {} cannot be followed by standby {}: {}", shard.job().spec().name(), options_.name,
                   copy.status().ToString());
      tap->sink().Detach(tap.get());
      return absl::OkStatus();
    }
    tap->sink().GiveState(tap.get(), b, copy->front().round);
    tap->GoesOnFrom(b, copy->front().round);
    for (const journal::Record& record : *copy) GW_RETURN_IF_ERROR(SendRecord(number, record));
    GW_RETURN_IF_ERROR(SendQueue());  // rounds of other jobs wait for theirs
  }
  tap->sink().StatesGiven(tap.get());
  return absl::OkStatus();
}

bool Feed::GoOn(Tap& tap, const JobRegistry::DurableJob& job) {
  const std::string& name = job.shard->job().spec().name();
  const auto copy = std::find_if(options_.copies.begin(), options_.copies.end(),
                                 [&](const v1::FollowCopy& c) { return c.job() == name; });
  if (copy == options_.copies.end()) return false;
  const int buckets = static_cast<int>(job.shard->bucket_count());
  if (copy->versions_size() != buckets || copy->digests_size() != buckets) return false;
  std::vector<CopyPosition> positions;
  for (int b = 0; b < buckets; ++b) positions.push_back({copy->versions(b), copy->digests(b)});
  const bool goes_on = tap.sink().GoOn(&tap, copy->history(), positions);
  for (int b = 0; goes_on && b < buckets; ++b) tap.GoesOnFrom(b, copy->versions(b));
  spdlog::info("job {}: standby {} {}", name, options_.name,
               goes_on ? "goes on from the records it has" : "takes all of the state");
  return goes_on;
}

absl::Status Feed::SendRecord(uint32_t job, const journal::Record& record) {
  v1::FollowMessage message;
  message.mutable_record()->set_job(job);
  std::vector<std::vector<Bytes>> pieces = PiecesOf(record);
  for (size_t i = 0; i < pieces.size(); ++i) {
    message.mutable_record()->set_last(i + 1 == pieces.size());
    GW_RETURN_IF_ERROR(Send(message, std::move(pieces[i])));
  }
  return absl::OkStatus();
}

absl::Status Feed::SendBeat() {
  next_beat_ = clock_->Now() + NsOfMs(options_.timeout_ms) / kBeatsPerTimeout;
  v1::FollowMessage message;
  v1::FollowBeat& beat = *message.mutable_beat();
  beat.set_server_epoch(registry_->environment().epochs->now());  // before it is looked who is in sync
  const std::vector<JobRegistry::DurableJob> jobs = registry_->Durable();
  std::set<const JobShard*> with_parameters;
  for (const JobRegistry::DurableJob& job : jobs) {
    if (job.shard->HasParameters()) with_parameters.insert(job.shard.get());
  }
  beat.set_jobs(static_cast<uint32_t>(with_parameters.size()));
  for (const auto& tap : Taps()) {  // also of jobs that are gone
    if (with_parameters.contains(&tap->shard()) && tap->sink().InSync(tap.get())) beat.add_in_sync(tap->number());
  }
  return Send(message);
}

absl::Status Feed::Send(const v1::FollowMessage& message, std::vector<Bytes> frame) {
  return out_->SendWhenRoom({message.SerializeAsString(), std::move(frame)});
}

}  // namespace gradwire
