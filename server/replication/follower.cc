// See follower.h.
#include "server/replication/follower.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/base/names.h"
#include "common/base/out_of_memory.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "server/replication/beat.h"
#include "server/replication/epoch.h"

namespace gradwire {
namespace {

constexpr int64_t kFirstPauseMs = 50;
constexpr int64_t kLastPauseMs = 2000;
// A state is as long as three frames of its bucket; contributions and headers come to it.
constexpr uint64_t kFramesPerRecord = 4;
constexpr uint64_t kRecordExtraBytes = 32u << 20;
// A job of more buckets is not offered to go on from: the first message of a stream stays small.
constexpr uint32_t kMaxCopyBuckets = 1u << 16;

// The connection was lost: what the primary said last still holds, as far as anybody can know.
bool IsLoss(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

// What was taken of one job, told to the primary on the stream that is open now. Thread-safe. Kept alive by the records
// that are on their way to the journal.
class Follower::Reports {
 public:
  // From now on it is told on this stream, where the job has that number.
  void SendTo(std::shared_ptr<Outbox> out, uint32_t number) {
    absl::MutexLock lock(&mu_);
    out_ = std::move(out);
    number_ = number;
  }
  void Taken(uint32_t bucket, uint64_t version) {
    v1::FollowRequest request;
    v1::Taken& taken = *request.add_taken();
    taken.set_bucket(bucket);
    taken.set_version(version);
    std::shared_ptr<Outbox> out;
    {
      absl::MutexLock lock(&mu_);
      taken.set_job(number_);
      out = out_;
    }
    out->Send({request.SerializeAsString(), {}}).IgnoreError();  // the next stream begins with what was taken
  }

 private:
  absl::Mutex mu_;
  std::shared_ptr<Outbox> out_ ABSL_GUARDED_BY(mu_);
  uint32_t number_ ABSL_GUARDED_BY(mu_) = 0;
};

// One stream and what belongs to it. OnMessage and OnClosed come from the transport, one at a time.
class Follower::Line final : public transport::StreamSink {
 public:
  struct Followed {
    std::shared_ptr<JobShard> shard;
    std::shared_ptr<Reports> reports;
    RecordAssembler assembler;
  };

  Line(Follower* follower, Clock* clock) : follower_(follower), clock_(clock), heard_(clock->Now()) {}

  void OnMessage(transport::Message message) override {
    heard_ = clock_->Now();
    if (over_) return;
    AwaitOut();
    const absl::Status handled = CatchBadAlloc("following", [&] { return follower_->Handle(*this, message); });
    heard_ = clock_->Now();  // it may have taken long
    if (handled.ok()) return;
    over_ = true;
    follower_->take_whole_ = true;
    End(handled);
  }
  void OnClosed(absl::Status status) override {
    End(status.ok() ? absl::UnavailableError("the primary ended the stream") : status);
  }

  void End(const absl::Status& why) {
    absl::MutexLock lock(&mu_);
    if (ended_.ok()) ended_ = why;
  }
  // Why it ended; ok while it has not.
  absl::Status ended() {
    absl::MutexLock lock(&mu_);
    return ended_;
  }
  // The same, after `timeout` at most.
  absl::Status AwaitEnd(absl::Duration timeout) {
    absl::MutexLock lock(&mu_);
    const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !ended_.ok(); };
    mu_.AwaitWithTimeout(absl::Condition(&ended), timeout);
    return ended_;
  }
  TimeNs heard() const { return heard_; }

  // The stream is open.
  void SetOut(std::shared_ptr<Outbox> out) {
    absl::MutexLock lock(&mu_);
    out_ = std::move(out);
  }
  std::shared_ptr<Outbox> out() {
    absl::MutexLock lock(&mu_);
    return out_;
  }

  bool greeted = false;
  std::map<uint32_t, Followed> jobs;  // of the sink

 private:
  Follower* const follower_;
  // A primary may speak before this side has been told that the stream is open.
  void AwaitOut() {
    absl::MutexLock lock(&mu_);
    const auto open = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return out_ != nullptr; };
    mu_.Await(absl::Condition(&open));
  }

  Clock* const clock_;
  std::atomic<TimeNs> heard_;
  bool over_ = false;
  absl::Mutex mu_;
  std::shared_ptr<Outbox> out_ ABSL_GUARDED_BY(mu_);
  absl::Status ended_ ABSL_GUARDED_BY(mu_);
};

struct Follower::OpenStream {
  explicit OpenStream(Follower* follower, Clock* clock) : line(follower, clock) {}
  Line line;
  // What the journals still have to say of this stream goes through it, also after it has ended.
  std::shared_ptr<Outbox> out;
  std::shared_ptr<transport::Stream> stream;  // destroying it waits for the line
};

Follower::Follower(FollowerOptions options, JobRegistry* registry, Clock* clock)
    : options_(std::move(options)), registry_(registry), clock_(clock) {
  absl::MutexLock lock(&mu_);
  state_.epoch = options_.known_epoch;
  state_.lineage = options_.lineage;
  state_.in_sync = options_.in_sync;
  if (!state_.in_sync) state_.why_not = "it has not reached its primary since it started";
}

Follower::~Follower() { Stop(); }

absl::Status Follower::Start() {
  GW_ASSIGN_OR_RETURN(channel_, options_.dial(options_.primary));
  if (!options_.thread) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(thread_, StartThread("following", [this] { Run(); }));
  return absl::OkStatus();
}

void Follower::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    wake_.SignalAll();
    if (line_ != nullptr) line_->End(absl::CancelledError("stopped"));
  }
  if (thread_.joinable()) thread_.join();
  if (open_ != nullptr) CloseStream();
}

FollowerState Follower::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

void Follower::NotInSync(std::string_view why) {
  absl::MutexLock lock(&mu_);
  state_.in_sync = false;
  state_.why_not = std::string(why);
}

void Follower::Run() {
  for (;;) {
    const absl::Duration wait = TakeTurn();
    if (open_ != nullptr) {
      open_->line.AwaitEnd(wait).IgnoreError();  // the next turn tells
      continue;
    }
    absl::MutexLock lock(&mu_);
    if (!stop_) wake_.WaitWithTimeout(&mu_, wait);
    if (stop_) return;
  }
}

absl::Duration Follower::TakeTurn() {
  const absl::Status status = open_ == nullptr ? Open() : LookAfter();
  if (status.ok()) return beat();
  if (open_ != nullptr) CloseStream();
  return NoteEnd(status);
}

absl::Duration Follower::NoteEnd(const absl::Status& ended) {
  const std::string why = ended.ToString();
  absl::MutexLock lock(&mu_);
  if (state_.connected || pause_ms_ == 0) pause_ms_ = kFirstPauseMs;
  if (state_.connected || why != said_) spdlog::warn("not following {}: {}", options_.primary, why);
  said_ = why;
  state_.connected = false;
  if (!IsLoss(ended)) state_.in_sync = false;
  if (!state_.in_sync) state_.why_not = why;
  return absl::Milliseconds(std::exchange(pause_ms_, std::min(2 * pause_ms_, kLastPauseMs)));
}

absl::Duration Follower::beat() const { return absl::Milliseconds(options_.timeout_ms / kBeatsPerTimeout); }

absl::Status Follower::Open() {
  auto open = std::make_unique<OpenStream>(this, clock_);
  absl::StatusOr<std::unique_ptr<transport::Stream>> opened =
      channel_->Open("gradwire.v1.Replication/Follow", &open->line);
  GW_RETURN_IF_ERROR(opened.status());
  open->stream = *std::move(opened);
  open->out = std::make_shared<Outbox>(open->stream);
  open->line.SetOut(open->out);
  open_ = std::move(open);
  v1::FollowRequest request;
  request.mutable_open()->set_name(options_.name);
  const FollowerState known = state();
  request.mutable_open()->set_known_epoch(known.epoch);
  request.mutable_open()->set_lineage(known.lineage.id());
  if (!take_whole_.exchange(false)) AddCopies(request.mutable_open());
  GW_RETURN_IF_ERROR(Send(request));
  absl::MutexLock lock(&mu_);
  if (stop_) return absl::CancelledError("stopped");
  line_ = &open_->line;
  return absl::OkStatus();
}

bool Follower::ended() const { return open_ != nullptr && !open_->line.ended().ok(); }

absl::Status Follower::LookAfter() {
  GW_RETURN_IF_ERROR(open_->line.ended());
  if (clock_->Now() - open_->line.heard() > NsOfMs(options_.timeout_ms)) {
    return absl::UnavailableError(absl::StrFormat("nothing was heard of it for %d ms", options_.timeout_ms));
  }
  return Send(v1::FollowRequest());
}

absl::Status Follower::Send(const v1::FollowRequest& request) {
  const absl::Status sent = open_->out->Send({request.SerializeAsString(), {}});
  if (sent.ok()) return sent;
  const absl::Status why = options_.thread ? open_->line.AwaitEnd(beat()) : open_->line.ended();
  return why.ok() ? absl::UnavailableError(sent.message()) : why;
}

void Follower::CloseStream() {
  {
    absl::MutexLock lock(&mu_);
    line_ = nullptr;
  }
  open_->stream->Cancel();
  open_->out->Release();
  open_ = nullptr;
}

void Follower::AddCopies(v1::FollowOpen* open) const {
  for (const JobRegistry::DurableJob& job : registry_->Durable()) {
    if (job.followed_history == 0 || job.shard->bucket_count() > kMaxCopyBuckets) continue;
    const std::vector<CopyPosition> positions = job.shard->recovery().Positions();
    if (positions.empty()) continue;
    v1::FollowCopy& copy = *open->add_copies();
    copy.set_job(job.shard->job().spec().name());
    copy.set_history(job.followed_history);
    for (const CopyPosition& position : positions) {
      copy.add_versions(position.version);
      copy.add_digests(position.digest);
    }
  }
}

absl::Status Follower::Handle(Line& line, const transport::Message& message) {
  v1::FollowMessage said;
  if (!said.ParseFromString(message.control)) return absl::InvalidArgumentError("not a gradwire.v1.FollowMessage");
  if (!line.greeted && !said.has_hello()) return absl::InvalidArgumentError("the first message is not a hello");
  switch (said.what_case()) {
    case v1::FollowMessage::kHello:
      GW_RETURN_IF_ERROR(Hello(said.hello()));
      line.greeted = true;
      return absl::OkStatus();
    case v1::FollowMessage::kBegin:
      return Begin(line, said.begin());
    case v1::FollowMessage::kRecord:
      return Record(line, said.record(), message);
    case v1::FollowMessage::kDeleted:
      return Deleted(line, said.deleted());
    case v1::FollowMessage::kBeat:
      Beat(line, said.beat());
      return absl::OkStatus();
    case v1::FollowMessage::WHAT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a message of an unknown kind: the primary is of a later version of Gradwire");
}

absl::Status Follower::Hello(const v1::FollowHello& hello) {
  GW_ASSIGN_OR_RETURN(const Lineage lineage, Lineage::OfKey(hello.lineage_key()));
  const FollowerState known = state();
  const bool same = known.lineage.SameAs(lineage);
  // One that knows no lineage was made before there were any: what it followed is what it is told to follow.
  const uint64_t least = same || known.lineage.none() ? known.epoch : 0;
  if (hello.server_epoch() < least) {
    return absl::FailedPreconditionError(
        absl::StrFormat("its epoch is %d, one of epoch %d was followed before: it was replaced, or its data directory "
                        "is another one; point --follow at the later server, or start with an empty --data-dir",
                        hello.server_epoch(), known.epoch));
  }
  if (!CredibleAfter(least, hello.server_epoch())) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "its epoch is %s, which no primary has that this server of epoch %s could follow: is --follow right?",
        EpochText(hello.server_epoch()), EpochText(least)));
  }
  if (TermOf(hello.server_epoch()) < options_.least_term) {
    return absl::UnavailableError(absl::StrFormat("its epoch is %s, of a term that has ended: it is being replaced",
                                                  EpochText(hello.server_epoch())));
  }
  if (!same) GW_RETURN_IF_ERROR(options_.adopt(lineage));
  absl::MutexLock lock(&mu_);
  state_.lineage = lineage;
  state_.epoch = hello.server_epoch();
  state_.connected = true;
  state_.in_sync = false;
  state_.why_not = "it is catching up";
  spdlog::info("following {}, epoch {}", options_.primary, hello.server_epoch());
  return absl::OkStatus();
}

absl::Status Follower::Begin(Line& line, const v1::FollowBegin& begin) {
  NotInSync(absl::StrFormat("job '%s' is catching up", Printable(begin.stored().spec().name())));
  const bool goes_on = begin.goes_on();
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> shard,
                      goes_on ? registry_->GoOn(begin.stored(), begin.layout_digest(), begin.history())
                              : registry_->Adopt(begin.stored(), begin.layout_digest(), begin.history()));
  std::shared_ptr<Reports>& reports = reports_[begin.stored().spec().name()];
  if (reports == nullptr || !goes_on) reports = std::make_shared<Reports>();
  reports->SendTo(line.out(), begin.job());
  const uint64_t limit = kFramesPerRecord * registry_->environment().frame_limit_bytes + kRecordExtraBytes;
  const auto [it, inserted] =
      line.jobs.try_emplace(begin.job(), Line::Followed{shard, reports, RecordAssembler(limit)});
  if (!inserted) return absl::InvalidArgumentError(absl::StrFormat("job number %d begins twice", begin.job()));
  if (!goes_on) return absl::OkStatus();
  const std::vector<uint64_t> safe = shard->log().SafeVersions();
  for (uint32_t b = 0; b < safe.size(); ++b) reports->Taken(b, safe[b]);
  return absl::OkStatus();
}

absl::Status Follower::Record(Line& line, const v1::FollowRecord& said, const transport::Message& message) {
  const auto it = line.jobs.find(said.job());
  if (it == line.jobs.end()) return absl::InvalidArgumentError(absl::StrFormat("no job has number %d", said.job()));
  GW_ASSIGN_OR_RETURN(std::optional<journal::Record> record, it->second.assembler.Add(message.frame, said.last()));
  if (!record) return absl::OkStatus();
  const uint32_t bucket = record->bucket;
  const uint64_t version = journal::VersionOf(*record);
  return it->second.shard->recovery().Follow(
      *std::move(record), [reports = it->second.reports, bucket, version] { reports->Taken(bucket, version); });
}

absl::Status Follower::Deleted(Line& line, const v1::FollowDeleted& deleted) {
  const auto it = line.jobs.find(deleted.job());
  if (it == line.jobs.end()) return absl::InvalidArgumentError(absl::StrFormat("no job has number %d", deleted.job()));
  const std::string name = it->second.shard->job().spec().name();
  line.jobs.erase(it);
  reports_.erase(name);
  return registry_->Delete(name);
}

void Follower::Beat(const Line& line, const v1::FollowBeat& beat) {
  absl::MutexLock lock(&mu_);
  const bool in_sync = beat.jobs() == static_cast<uint32_t>(beat.in_sync_size());
  if (TermOf(beat.server_epoch()) == TermOf(state_.epoch)) state_.epoch = std::max(state_.epoch, beat.server_epoch());
  if (in_sync && !state_.in_sync) spdlog::info("in sync with {}", options_.primary);
  state_.in_sync = in_sync;
  state_.why_not = in_sync ? ""
                           : absl::StrFormat("%d of %d jobs are in sync", beat.in_sync_size(),
                                             std::max<size_t>(beat.jobs(), line.jobs.size()));
}

}  // namespace gradwire
