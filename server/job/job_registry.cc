// Finding, making and deleting jobs; see job_registry.h.
#include "server/job/job_registry.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "server/journal/job_journal.h"

namespace gradwire {
namespace {

// Whole segments are removed after a snapshot: a longer one than the growth that leads to a snapshot would stay.
constexpr uint64_t kMaxSegmentBytes = 64u << 20;
// Whoever waits for a job that another call makes keeps a thread of the transport, of which there are not many.
constexpr size_t kMaxWaiters = 16;  // for one job
constexpr size_t kMaxWaitersOfAll = 64;

absl::Status NoSuchJob(std::string_view name) {
  return absl::NotFoundError(absl::StrFormat(
      "job '%s' does not exist on this server: join it, or create it with `gradwire job create`", Printable(name)));
}

// Only ever compared for equality: no run depends on it.
uint64_t NewId() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device() | 1;
}

}  // namespace

JobEnvironment JobRegistry::WithAccount(JobEnvironment environment, const Limits& limits) {
  environment.account = std::make_shared<MemoryAccount>(limits.memory_bytes);
  return environment;
}

absl::Status JobRegistry::AwaitMade(const std::string& name) {
  if (!making_.contains(name)) return absl::OkStatus();
  const auto here = waiting_.emplace(name, 0).first;
  if (here->second >= kMaxWaiters || waiters_ >= kMaxWaitersOfAll) {
    if (here->second == 0) waiting_.erase(here);
    return absl::UnavailableError(absl::StrFormat("job '%s' is being made: try again", Printable(name)));
  }
  ++here->second;
  ++waiters_;
  const auto made = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !making_.contains(name); };
  mu_.Await(absl::Condition(&made));
  --waiters_;
  if (--here->second == 0) waiting_.erase(here);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<JobShard>> JobRegistry::FindOrBegin(const std::string& name) {
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(AwaitMade(name));
    if (draining_) {
      return absl::UnavailableError("this server is shutting down and takes no new workers: try again when it is back");
    }
    if (following_) return absl::UnavailableError("this server is a standby, or becomes one: ask its primary");
    const auto lost = unrecovered_.find(name);
    if (lost != unrecovered_.end()) return lost->second;
    const auto it = jobs_.find(name);
    if (it != jobs_.end()) return it->second;
    if (jobs_.size() + making_.size() < limits_.max_jobs) {
      making_.insert(name);
      return nullptr;
    }
  }
  return TooManyJobs(name);
}

void JobRegistry::EndMaking(const std::string& name) {
  absl::MutexLock lock(&mu_);
  making_.erase(name);
}

absl::StatusOr<std::shared_ptr<JobShard>> JobRegistry::GetOrCreate(const v1::JobSpec& spec, uint32_t shard_index,
                                                                   uint32_t shard_count, uint64_t layout_digest) {
  const std::string& name = spec.name();
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> known, FindOrBegin(name));
  if (known != nullptr) {
    GW_ASSIGN_OR_RETURN(const Job asked, Job::Make(spec));
    GW_RETURN_IF_ERROR(known->CheckSame(asked, shard_index, shard_count, layout_digest));
    return known;
  }
  const absl::Cleanup ended = [this, &name] { EndMaking(name); };
  // A spec of a few bytes may ask for seconds of work: under no lock that others want.
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> made,
                      JobShard::Make(spec, shard_index, shard_count, environment_, layout_digest));
  made->SetInstance(NewId());
  absl::MutexLock create(&create_mu_);
  {
    absl::MutexLock lock(&mu_);
    if (jobs_.contains(name) || unrecovered_.contains(name) || draining_ || following_) {
      return absl::UnavailableError(absl::StrFormat("job '%s': this server has changed its state: try again", name));
    }
  }
  ReplicatedSink* sink = nullptr;
  if (made->job().durable()) {
    GW_ASSIGN_OR_RETURN(sink, Store(*made, /*followed_history=*/0));
  }
  GW_RETURN_IF_ERROR(InsertNew(made, sink, /*followed_history=*/0));
  spdlog::info("job {} created: shard {} of {}, {} buckets, {} elements, up to {}", name, shard_index, shard_count,
               made->bucket_count(), made->layout().shard_elements(shard_index), made->memory().ToString());
  return made;
}

absl::StatusOr<ReplicatedSink*> JobRegistry::Store(JobShard& shard, uint64_t followed_history) {
  const std::string& name = shard.job().spec().name();
  if (data_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "job '%s' asks for durability, but this server keeps nothing: start it with --data-dir, or leave the job's "
        "durability unset",
        name));
  }
  v1::StoredJob stored;
  *stored.mutable_spec() = shard.job().spec();
  stored.set_shard_index(shard.shard_index());
  stored.set_shard_count(shard.layout().shard_count());
  stored.set_instance(shard.instance());
  if (followed_history != 0) {
    stored.set_followed_history(followed_history);
    stored.set_followed_term(Term());
  }
  absl::Status status = data_->CreateJob(stored);
  if (absl::IsAlreadyExists(status)) {  // of an attempt that failed: it is no job
    status = data_->RemoveJob(name);
    if (status.ok()) status = data_->CreateJob(stored);
  }
  if (status.ok()) {
    absl::StatusOr<ReplicatedSink*> sink =
        CatchBadAlloc("its journal", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_) {
          return OpenSink(shard, followed_history != 0, /*starting=*/false);
        });
    if (sink.ok()) return sink;
    status = sink.status();
  }
  data_->RemoveJob(name).IgnoreError();  // what stays is replaced later, or found at a start
  return absl::Status(status.code(), absl::StrFormat("job '%s' cannot be stored on this server: %s", name,
                                                     std::string(status.message())));
}

absl::StatusOr<ReplicatedSink*> JobRegistry::OpenSink(JobShard& shard, bool following, bool starting) {
  const ReplicationHooks hooks{&serve_until_, on_change_, on_lost_sync_, NewId(), following};
  return OpenJournal(*data_, shard, environment_.clock,
                     {following, SegmentBytes(), hooks, environment_.adopt_journal, starting});
}

uint64_t JobRegistry::SegmentBytes() const { return std::min(kMaxSegmentBytes, limits_.snapshot_journal_bytes); }

absl::StatusOr<std::shared_ptr<JobShard>> JobRegistry::Adopt(const v1::StoredJob& stored, uint64_t layout_digest,
                                                             uint64_t history) {
  absl::MutexLock create(&create_mu_);
  const std::string& name = stored.spec().name();
  const absl::StatusOr<std::shared_ptr<JobShard>> before = Find(name);
  const absl::Status removed = Remove(name);
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  if (before.ok()) (*before)->ReturnShare();  // whoever followed it has still to let go of it
  GW_ASSIGN_OR_RETURN(
      const std::shared_ptr<JobShard> made,
      JobShard::Make(stored.spec(), stored.shard_index(), stored.shard_count(), environment_, layout_digest));
  made->SetInstance(stored.instance());
  // A primary that says nothing of its history is not gone on from: one that nobody has.
  const uint64_t followed = history != 0 ? history : NewId();
  GW_ASSIGN_OR_RETURN(ReplicatedSink* const sink, Store(*made, followed));
  GW_RETURN_IF_ERROR(InsertNew(made, sink, followed));
  return made;
}

absl::StatusOr<std::shared_ptr<JobShard>> JobRegistry::GoOn(const v1::StoredJob& stored, uint64_t layout_digest,
                                                            uint64_t history) {
  GW_ASSIGN_OR_RETURN(const Job asked, Job::Make(stored.spec()));
  absl::MutexLock create(&create_mu_);
  std::shared_ptr<JobShard> known;
  {
    absl::MutexLock lock(&mu_);
    const auto it = durable_.find(stored.spec().name());
    if (it != durable_.end() && history != 0 && it->second.followed_history == history) known = it->second.shard;
  }
  if (known == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s': there is no copy of this history to go on from", stored.spec().name()));
  }
  GW_RETURN_IF_ERROR(known->CheckSame(asked, stored.shard_index(), stored.shard_count(), layout_digest));
  return known;
}

void JobRegistry::EndFollowing() {
  absl::MutexLock create(&create_mu_);
  for (const DurableJob& job : Durable()) {
    const absl::Status ended = job.shard->recovery().End();
    if (ended.ok()) {
      job.sink->Serve(job.shard->HasParameters());
      continue;
    }
    const std::string name = job.shard->job().spec().name();
    job.shard->Shut(ended);
    std::unique_ptr<Snapshotter> snapshotter;
    {
      absl::MutexLock lock(&mu_);
      snapshotter = std::move(snapshotters_[name]);
      snapshotters_.erase(name);
      durable_.erase(name);
      jobs_.erase(name);
    }
    snapshotter.reset();
    job.shard->log().Stop();
    NoteUnrecovered(name, ended);
  }
  absl::MutexLock lock(&mu_);
  following_ = false;
}

void JobRegistry::FenceAll(const absl::Status& status) {
  for (const DurableJob& job : Durable()) job.sink->Fence();
  ShutAll(status);
}

absl::Status JobRegistry::BeginFollowing() {
  std::map<std::string, std::unique_ptr<Snapshotter>, std::less<>> snapshotters;
  std::map<std::string, std::shared_ptr<JobShard>, std::less<>> jobs;
  {
    absl::MutexLock create(&create_mu_);
    absl::MutexLock lock(&mu_);
    snapshotters.swap(snapshotters_);
    jobs.swap(jobs_);
    durable_.clear();
    unrecovered_.clear();
    following_ = true;
  }
  snapshotters.clear();
  for (const auto& [name, job] : jobs) {
    job->log().Stop();
    job->ReturnShare();
  }
  jobs.clear();
  return RecoverAll(/*following=*/true, /*starting=*/false);
}

void JobRegistry::ServeUntil(TimeNs until) {
  serve_until_ = until;
  for (const DurableJob& job : Durable()) job.sink->Resume();
}

std::vector<JobRegistry::DurableJob> JobRegistry::Durable() const {
  absl::MutexLock lock(&mu_);
  std::vector<DurableJob> all;
  for (const auto& [name, job] : durable_) all.push_back(job);
  return all;
}

absl::Status JobRegistry::RecoverAll(bool following, bool starting) {
  absl::MutexLock create(&create_mu_);
  {
    absl::MutexLock lock(&mu_);
    following_ = following;
  }
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, data_->Jobs());
  for (const std::string& name : names) {
    const absl::Status recovered = CatchBadAlloc("its recovery", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_) {
      return RecoverJob(name, following, starting);
    });
    if (!recovered.ok()) NoteUnrecovered(name, recovered);
  }
  return absl::OkStatus();
}

void JobRegistry::NoteUnrecovered(const std::string& name, const absl::Status& why) {
  spdlog::error("job {} cannot be recovered: {}", name, why.ToString());
  absl::MutexLock lock(&mu_);
  unrecovered_[name] = absl::Status(
      why.code(), absl::StrFormat("job '%s' could not be recovered: %s", name, std::string(why.message())));
}

absl::Status JobRegistry::RecoverJob(const std::string& name, bool following, bool starting) {
  GW_ASSIGN_OR_RETURN(const v1::StoredJob stored, data_->LoadJob(name));
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> made,
                      JobShard::Make(stored.spec(), stored.shard_index(), stored.shard_count(), environment_));
  made->SetInstance(stored.instance());
  const uint64_t epoch = data_->epoch();
  GW_ASSIGN_OR_RETURN(ReplicatedSink* const sink, OpenSink(*made, following, starting));
  if (data_->epoch() != epoch) environment_.epochs->Begin(data_->epoch());
  // A later term: this server was primary since, and what it has is its own.
  return Insert(made, sink, following && stored.followed_term() == Term() ? stored.followed_history() : 0);
}

absl::Status JobRegistry::InsertNew(const std::shared_ptr<JobShard>& shard, ReplicatedSink* sink,
                                    uint64_t followed_history) {
  absl::Status inserted = Insert(shard, sink, followed_history);
  if (inserted.ok() || sink == nullptr) return inserted;
  shard->log().Stop();
  data_->RemoveJob(shard->job().spec().name()).IgnoreError();  // what stays is replaced later, or found at a start
  return inserted;
}

absl::Status JobRegistry::Insert(const std::shared_ptr<JobShard>& shard, ReplicatedSink* sink,
                                 uint64_t followed_history) {
  const std::string& name = shard->job().spec().name();
  std::unique_ptr<Snapshotter> snapshotter;
  if (sink != nullptr && !environment_.adopt_journal) {
    GW_RETURN_IF_ERROR(CatchBadAlloc("snapshots", [&] {
      snapshotter = std::make_unique<Snapshotter>(shard, &data_->disk(), data_->SnapshotsOf(name),
                                                  limits_.snapshot_journal_bytes);
      return absl::OkStatus();
    }));
  }
  {
    absl::MutexLock lock(&mu_);
    jobs_[name] = shard;
    if (snapshotter != nullptr) snapshotters_[name] = std::move(snapshotter);
    if (sink != nullptr) durable_[name] = {shard, sink, followed_history};
  }
  if (sink != nullptr) on_change_();
  return absl::OkStatus();
}

absl::Status JobRegistry::RequestSnapshot(std::string_view name) {
  GW_RETURN_IF_ERROR(Find(name).status());
  absl::MutexLock lock(&mu_);
  const auto it = snapshotters_.find(name);
  if (it == snapshotters_.end()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s' is not durable: this server keeps no snapshots of it", std::string(name)));
  }
  it->second->Request();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<JobShard>> JobRegistry::Find(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  const auto it = jobs_.find(name);
  if (it != jobs_.end()) return it->second;
  const auto lost = unrecovered_.find(name);
  if (lost != unrecovered_.end()) return lost->second;
  return NoSuchJob(name);
}

std::vector<std::shared_ptr<JobShard>> JobRegistry::All() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<JobShard>> all;
  for (const auto& [name, job] : jobs_) all.push_back(job);
  return all;
}

void JobRegistry::ForgetUnused(const std::shared_ptr<JobShard>& job) {
  absl::MutexLock create(&create_mu_);
  const std::string& name = job->job().spec().name();
  const absl::StatusOr<std::shared_ptr<JobShard>> here = Find(name);
  if (!here.ok() || *here != job || !job->Unused()) return;
  const absl::Status removed = Remove(name);
  on_change_();
  spdlog::warn("job {}: other shards have it and this one has nothing: forgotten here{}", name,
               removed.ok() ? "" : absl::StrCat("; ", removed.ToString()));
}

uint64_t JobRegistry::unrecovered() const {
  absl::MutexLock lock(&mu_);
  return unrecovered_.size();
}

absl::Status JobRegistry::Delete(std::string_view name) {
  absl::MutexLock create(&create_mu_);
  const absl::Status removed = Remove(name);
  on_change_();
  GW_RETURN_IF_ERROR(removed);
  spdlog::info("job {} deleted", name);
  return absl::OkStatus();
}

absl::Status JobRegistry::Remove(std::string_view name) {
  std::shared_ptr<JobShard> job;
  std::unique_ptr<Snapshotter> snapshotter;
  bool stored = false;
  {
    absl::MutexLock lock(&mu_);
    const auto taker = snapshotters_.find(name);
    if (taker != snapshotters_.end()) {
      snapshotter = std::move(taker->second);
      snapshotters_.erase(taker);
    }
    const auto durable = durable_.find(name);
    const auto it = jobs_.find(name);
    const auto lost = unrecovered_.find(name);
    stored = durable != durable_.end() || lost != unrecovered_.end();
    if (durable != durable_.end()) durable_.erase(durable);
    if (it != jobs_.end()) {
      job = it->second;
      jobs_.erase(it);
    } else if (lost != unrecovered_.end()) {
      unrecovered_.erase(lost);
    } else {
      return NoSuchJob(name);
    }
  }
  if (job != nullptr) {
    job->Shut(absl::AbortedError(absl::StrFormat("job '%s' was deleted", std::string(name))));
    snapshotter.reset();
    job->log().Stop();
  }
  const absl::Status removed = data_ != nullptr ? data_->RemoveJob(std::string(name)) : absl::OkStatus();
  if (removed.ok() || !stored) return removed;
  const absl::Status stays(removed.code(), absl::StrFormat("job '%s' was deleted, but what is stored of it cannot be "
                                                           "removed: %s: delete it again",
                                                           std::string(name), std::string(removed.message())));
  spdlog::error("{}", stays.ToString());
  absl::MutexLock lock(&mu_);
  unrecovered_[std::string(name)] = stays;  // the next start would find it
  return stays;
}

void JobRegistry::Drain() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
}

bool JobRegistry::draining() const {
  absl::MutexLock lock(&mu_);
  return draining_;
}

void JobRegistry::HurrySnapshots() {
  absl::MutexLock lock(&mu_);
  for (const auto& [name, snapshotter] : snapshotters_) snapshotter->Hurry();
}

void JobRegistry::ShutAll(const absl::Status& status) {
  for (const auto& job : All()) job->Shut(status);
}

void JobRegistry::WarnRefused(std::string_view what, const absl::Status& status) {
  // Without memory a warning is lost, nothing else.
  CatchBadAlloc("a warning", [&] {
    if (refusals_.Admit(status.code(), environment_.clock->Now())) {
      spdlog::warn("{} refused: {}", what, status.ToString());
    }
    return absl::OkStatus();
  }).IgnoreError();
}

void JobRegistry::Tick(WorkPool* pool, TimeNs slept) {
  const TimeNs now = environment_.clock->Now();
  for (const WarningLimiter::Count& more : refusals_.TakeEnded(now)) {
    spdlog::warn("{} more streams and calls refused with {} within 10 s", more.warnings,
                 absl::StatusCodeToString(more.kind));
  }
  for (const auto& job : All()) job->Tick(now, pool, slept);
  EndUnused();
}

uint64_t JobRegistry::memory_bytes() const { return environment_.account->used(); }

}  // namespace gradwire
