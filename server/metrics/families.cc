// Which field of a status is which metric; see families.h. A new one is a line of a table.
#include "server/metrics/families.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "server/replication/epoch.h"

namespace gradwire::metrics {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// A metric and where its value stands in a status of type T.
template <typename T>
struct Metric {
  const char* name;
  MetricType type;
  const char* help;
  double (*value)(const T&);
};

constexpr MetricType kGauge = MetricType::Gauge;
constexpr MetricType kCounter = MetricType::Counter;
constexpr double kMsPerSecond = 1000;

constexpr Metric<Reading> kServerMetrics[] = {
    {"gradwire_uptime_seconds", kGauge, "Time since the server started.",
     [](const Reading& r) -> double { return r.shard.uptime_s(); }},
    {"gradwire_memory_bytes", kGauge, "Bound of the memory that the jobs of this server may take.",
     [](const Reading& r) -> double { return r.shard.memory_bytes(); }},
    {"gradwire_memory_limit_bytes", kGauge, "What gradwire_memory_bytes may grow to (--memory-limit-bytes).",
     [](const Reading& r) -> double { return r.shard.memory_limit_bytes(); }},
    {"gradwire_jobs", kGauge, "Jobs on this server.", [](const Reading& r) -> double { return r.shard.jobs(); }},
    {"gradwire_unrecovered_jobs", kGauge,
     "Jobs in the data directory that could not be recovered, or not be removed; the log says why, workers get that "
     "error.",
     [](const Reading& r) -> double { return r.unrecovered_jobs; }},
    {"gradwire_draining", kGauge, "1 while the server shuts down: nobody may join.",
     [](const Reading& r) -> double { return r.shard.draining(); }},
    {"gradwire_standby", kGauge, "1 while this server is the standby of another (--follow) and serves no workers.",
     [](const Reading& r) -> double { return !r.shard.following().empty(); }},
    {"gradwire_fenced", kGauge, "1 once another server has taken over: this one serves nobody any more.",
     [](const Reading& r) -> double { return r.shard.fenced(); }},
    {"gradwire_epoch_term", kGauge, "Term of the server epoch: grows with every promotion. Random without --data-dir.",
     [](const Reading& r) -> double { return TermOf(r.shard.server_epoch()); }},
    {"gradwire_epoch_starts", kGauge,
     "Starts within the term of the server epoch; with a lease also standbys lost and jobs begun. Random without "
     "--data-dir.",
     [](const Reading& r) -> double { return StartsOf(r.shard.server_epoch()); }},
};

constexpr Metric<v1::JobStatus> kJobMetrics[] = {
    {"gradwire_job_version", kGauge, "Newest version of the parameters that workers may see: rounds that are done.",
     [](const v1::JobStatus& s) -> double { return s.version(); }},
    {"gradwire_job_initialized", kGauge, "1 once the initial parameters are here.",
     [](const v1::JobStatus& s) -> double { return s.initialized(); }},
    {"gradwire_job_elements", kGauge, "Parameters of the job that this shard owns.",
     [](const v1::JobStatus& s) -> double { return s.elements(); }},
    {"gradwire_job_memory_bytes", kGauge, "Bound of the memory that the job may take on this shard.",
     [](const v1::JobStatus& s) -> double { return s.memory_bytes(); }},
    {"gradwire_job_workers", kGauge, "Workers that have joined and whose leases run.",
     [](const v1::JobStatus& s) -> double { return s.workers_size(); }},
    {"gradwire_job_open_round", kGauge, "The round that is open.",
     [](const v1::JobStatus& s) -> double { return s.rounds().open_round(); }},
    {"gradwire_job_round_members", kGauge, "Workers that contribute to the open round.",
     [](const v1::JobStatus& s) -> double { return s.rounds().members(); }},
    {"gradwire_job_round_deadline_seconds", kGauge,
     "How long a round with a quorum waits for the others; 0: for as long as it takes.",
     [](const v1::JobStatus& s) -> double { return s.rounds().deadline_ms() / kMsPerSecond; }},
    {"gradwire_job_short_rounds_total", kCounter, "Rounds in which a bucket closed without one of its members.",
     [](const v1::JobStatus& s) -> double { return s.rounds().short_rounds(); }},
    {"gradwire_job_push_bytes_total", kCounter, "Bytes of push frames received, headers counted.",
     [](const v1::JobStatus& s) -> double { return s.push_bytes(); }},
    {"gradwire_job_pull_bytes_total", kCounter, "Bytes of update frames sent, headers counted.",
     [](const v1::JobStatus& s) -> double { return s.pull_bytes(); }},
    {"gradwire_job_initialize_bytes_total", kCounter, "Bytes of initial parameters received, headers counted.",
     [](const v1::JobStatus& s) -> double { return s.initialize_bytes(); }},
    {"gradwire_job_parameter_bytes_total", kCounter, "Bytes of parameter frames sent, headers counted.",
     [](const v1::JobStatus& s) -> double { return s.parameter_bytes(); }},
    {"gradwire_job_update_elements_total", kCounter, "Elements of decoded updates, deferred ones not counted.",
     [](const v1::JobStatus& s) -> double { return s.update_elements(); }},
    {"gradwire_job_deferred_elements_total", kCounter,
     "Elements that could not be decoded and go with a later round, from the workers' residuals.",
     [](const v1::JobStatus& s) -> double { return s.deferred_elements(); }},
    {"gradwire_job_sanitized_elements_total", kCounter,
     "Gradient elements that workers counted as 0 because they were not finite; the same on every shard of a job.",
     [](const v1::JobStatus& s) -> double { return s.sanitized_elements(); }},
    {"gradwire_job_nonfinite_rounds_total", kCounter,
     "Rounds that were no steps (a gradient was not finite, or parameters were replaced); the same on every shard.",
     [](const v1::JobStatus& s) -> double { return s.rounds().nonfinite_rounds(); }},
    {"gradwire_job_refused_frames_total", kCounter, "Frames that were refused as wrong.",
     [](const v1::JobStatus& s) -> double { return s.refused_frames(); }},
    {"gradwire_job_not_included_frames_total", kCounter,
     "Frames that came too late for their round and went back to the worker's residual.",
     [](const v1::JobStatus& s) -> double { return s.not_included_frames(); }},
    {"gradwire_job_durability_degraded", kGauge,
     "1 while the journal cannot be written, or lacks update frames that the next snapshot makes up for.",
     [](const v1::JobStatus& s) -> double { return s.durability().degraded() || s.durability().hole(); }},
};

// Of jobs with a journal.
constexpr Metric<v1::DurabilityStatus> kJournalMetrics[] = {
    {"gradwire_job_journal_hole", kGauge,
     "1 while update frames are missing in the journal: until the next snapshot a restart loses what came after them.",
     [](const v1::DurabilityStatus& s) -> double { return s.hole(); }},
    {"gradwire_job_durable_version", kGauge, "Version that survives a loss of power.",
     [](const v1::DurabilityStatus& s) -> double { return s.durable_version(); }},
    {"gradwire_job_journal_bytes", kGauge, "Bytes of the journal on disk.",
     [](const v1::DurabilityStatus& s) -> double { return s.journal_bytes(); }},
    {"gradwire_job_journal_backlog_bytes", kGauge, "Bytes that wait in memory until the disk can be written again.",
     [](const v1::DurabilityStatus& s) -> double { return s.backlog_bytes(); }},
    {"gradwire_job_journal_records_total", kCounter, "Records written to the journal.",
     [](const v1::DurabilityStatus& s) -> double { return s.records(); }},
    {"gradwire_job_journal_syncs_total", kCounter, "Syncs of the journal.",
     [](const v1::DurabilityStatus& s) -> double { return s.syncs(); }},
    {"gradwire_job_journal_failures_total", kCounter, "Times that the journal could not be written.",
     [](const v1::DurabilityStatus& s) -> double { return s.failures(); }},
    {"gradwire_job_snapshot_version", kGauge, "Version of the newest snapshot on disk; 0: there is none.",
     [](const v1::DurabilityStatus& s) -> double { return s.snapshot_version(); }},
    {"gradwire_job_snapshots_total", kCounter, "Snapshots that were tried.",
     [](const v1::DurabilityStatus& s) -> double { return s.snapshots(); }},
    {"gradwire_job_snapshot_failed", kGauge, "1 while the last snapshot that was tried could not be taken.",
     [](const v1::DurabilityStatus& s) -> double { return !s.snapshot_error().empty(); }},
};

constexpr Metric<v1::BucketTraffic> kTrafficMetrics[] = {
    {"gradwire_job_bucket_contributors", kGauge, "Frames in the last round of the bucket.",
     [](const v1::BucketTraffic& t) -> double { return t.contributors(); }},
    {"gradwire_job_bucket_dense_pushes", kGauge, "Frames in the last round of the bucket that carried all elements.",
     [](const v1::BucketTraffic& t) -> double { return t.dense_pushes(); }},
    {"gradwire_job_bucket_dense_update", kGauge, "1 where the last update of the bucket carried all elements.",
     [](const v1::BucketTraffic& t) -> double { return t.dense_update(); }},
    {"gradwire_job_bucket_density_ratio", kGauge, "Share of the bucket's elements that one worker sent, the mean.",
     [](const v1::BucketTraffic& t) -> double { return t.density(); }},
    {"gradwire_job_bucket_union_ratio", kGauge,
     "Elements of the union over those of one worker: 1 where all send the same ones.",
     [](const v1::BucketTraffic& t) -> double { return t.gamma(); }},
};

constexpr std::pair<const char*, uint64_t (v1::BucketTraffic::*)() const> kForms[] = {
    {"dense", &v1::BucketTraffic::dense_bytes},
    {"coordinates", &v1::BucketTraffic::coordinates_bytes},
    {"bitmap", &v1::BucketTraffic::bitmap_bytes},
    {"gaps", &v1::BucketTraffic::gaps_bytes},
    {"sketch", &v1::BucketTraffic::sketch_bytes}};

const char* LevelText(v1::DurabilityLevel level) {
  if (level == v1::DURABILITY_FSYNC) return "fsync";
  return level == v1::DURABILITY_INTERVAL ? "interval" : "none";
}

// The families so far, each in one piece.
class Page {
 public:
  void Add(const char* name, MetricType type, const char* help, Labels labels, double value) {
    const auto [at, is_new] = places_.try_emplace(name, families_.size());
    if (is_new) families_.push_back({name, help, type, {}});
    ClientMetric metric;
    metric.label = std::move(labels);
    if (type == kCounter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    families_[at->second].metric.push_back(std::move(metric));
  }
  template <typename Table, typename T>
  void AddAll(const Table& table, const Labels& labels, const T& status) {
    for (const auto& metric : table) Add(metric.name, metric.type, metric.help, labels, metric.value(status));
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<MetricFamily> families_;
  std::map<std::string, size_t> places_;
};

Labels With(Labels labels, std::initializer_list<ClientMetric::Label> more) {
  labels.insert(labels.end(), more);
  return labels;
}

void AddFollowers(const v1::JobStatus& job, const Labels& labels, Page* page) {
  // The stream of a standby that has just come back may be there beside its last one.
  std::map<std::string, v1::FollowerStatus> newest;
  for (const v1::FollowerStatus& follower : job.followers()) {
    v1::FollowerStatus& known = newest[follower.follower()];
    if (known.follower().empty() || follower.version() > known.version()) known = follower;
  }
  for (const auto& [name, follower] : newest) {
    const Labels its = With(labels, {{"follower", name}});
    const uint64_t newer = std::max(job.version(), follower.version());
    page->Add("gradwire_job_follower_lag_rounds", kGauge, "Versions of this job that a standby has not taken yet.", its,
              static_cast<double>(newer - follower.version()));
    page->Add("gradwire_job_follower_in_sync", kGauge, "1 while rounds wait until the standby has taken them.", its,
              follower.in_sync());
  }
}

void AddWorkers(const v1::JobStatus& job, const Labels& labels, Page* page) {
  for (int i = 0; i < std::min(job.workers_size(), kMaxWorkersTold); ++i) {
    const v1::WorkerStatus& worker = job.workers(i);
    page->Add("gradwire_job_worker_held_up_seconds_total", kCounter,
              "For how long this worker alone was awaited, while all others had nothing left to send; since it joined.",
              With(labels, {{"worker", worker.worker()}}), static_cast<double>(worker.held_up_ms()) / kMsPerSecond);
  }
}

void AddTraffic(const v1::JobStatus& job, const Labels& labels, Page* page) {
  size_t left = kMaxTrafficBuckets;
  for (const v1::BucketTraffic& traffic : job.traffic()) {
    if (left-- == 0) return;
    const Labels its = With(labels, {{"bucket", std::to_string(traffic.bucket())}, {"codec", traffic.codec()}});
    page->AddAll(kTrafficMetrics, its, traffic);
    for (const auto& [form, bytes] : kForms) {
      page->Add("gradwire_job_bucket_form_bytes", kGauge,
                "What each form of the bucket would have taken in its last round: one worker's push and update.",
                With(its, {{"form", form}}), static_cast<double>((traffic.*bytes)()));
    }
  }
}

}  // namespace

std::vector<MetricFamily> ToFamilies(const Reading& reading) {
  Page page;
  page.Add("gradwire_server_info", kGauge, "Version and backend of the server; always 1.",
           {{"version", reading.shard.version()}, {"backend", reading.shard.backend()}}, 1);
  page.AddAll(kServerMetrics, {}, reading);
  for (const v1::JobStatus& job : reading.jobs) {
    const Labels labels = {{"job", job.job()}, {"shard", std::to_string(job.shard_index())}};
    const v1::DurabilityStatus& durability = job.durability();
    const char* const level = LevelText(durability.level());
    page.Add("gradwire_job_info", kGauge, "Number of shards and durability of a job; always 1.",
             With(labels, {{"shards", std::to_string(job.shard_count())}, {"durability", level}}), 1);
    page.AddAll(kJobMetrics, labels, job);
    if (durability.level() > v1::DURABILITY_NONE) page.AddAll(kJournalMetrics, labels, durability);
    AddFollowers(job, labels, &page);
    AddWorkers(job, labels, &page);
    AddTraffic(job, labels, &page);
  }
  return page.Take();
}

}  // namespace gradwire::metrics
