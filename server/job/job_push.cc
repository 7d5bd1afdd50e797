// The way of a chunk into its accumulator, and the acknowledgement of its frame; see job_shard.h.
// Every check of remote bytes ends here in a typed acknowledgement; nothing of a refused frame stays merged.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {
namespace {

bool IsLast(const wire::FrameHeader& header) { return (header.flags & wire::kLastChunk) != 0; }

v1::PushOutcome OutcomeOf(PushVerdict verdict) {
  switch (verdict) {
    case PushVerdict::kAccept:
      return v1::PUSH_INCLUDED;
    case PushVerdict::kNotIncluded:
      return v1::PUSH_NOT_INCLUDED;
    case PushVerdict::kDuplicate:
      return v1::PUSH_DUPLICATE;
  }
  return v1::PUSH_OUTCOME_UNSPECIFIED;
}

}  // namespace

absl::StatusOr<std::optional<v1::PushAck>> JobShard::PushChunk(PushStream& stream, std::span<const Bytes> received) {
  // Joined where the thread joined the chunk before: that memory is in its core's cache. It grows to the largest
  // message that the transport takes.
  thread_local std::vector<uint8_t> scratch;
  const uint64_t size = TotalSize(received);
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    const auto totals = totals_.find(stream.member);
    if (totals != totals_.end()) totals->second.bytes += size;
  }
  const absl::StatusOr<wire::Chunk> chunk = wire::ParseReceived(received, &scratch);
  if (!chunk.ok()) {
    // Damaged on its way, most likely: as on a connection that was cut, the frame comes again on the worker's next
    // stream. The round waits for it: what it carries is not lost.
    ++refused_frames_;
    return absl::Status(chunk.status().code(),
                        absl::StrFormat("job '%s' worker '%s': %s; open a new stream and push again",
                                        job_.spec().name(), stream.worker, std::string(chunk.status().message())));
  }
  const wire::FrameHeader header = chunk->header;
  (header.kind == wire::FrameKind::kInitialize ? initialize_bytes_ : push_bytes_) += size;
  if (header.bucket >= buckets_.size()) {
    ++refused_frames_;
    return absl::InvalidArgumentError(absl::StrFormat("job '%s' worker '%s': bucket %d does not exist: this job has %d",
                                                      job_.spec().name(), stream.worker, header.bucket,
                                                      buckets_.size()));
  }
  const auto skipped = stream.skipped.find(header.bucket);
  if (skipped != stream.skipped.end()) {
    if (header.chunk != 0 && header.round == skipped->second.round) {
      return PushSkipped(stream, *chunk, skipped->second);
    }
    stream.skipped.erase(skipped);
  }
  if (absl::Status status = CheckHeader(stream, header); !status.ok()) return Refuse(stream, header, status);
  if (header.kind == wire::FrameKind::kInitialize) return PushInitialize(stream, *chunk, received);
  if ((header.flags & wire::kReplace) != 0) return PushReplacement(stream, *chunk, received);
  if ((header.flags & wire::kAbstain) != 0) return PushAbstain(stream, header);
  return PushFrame(stream, *chunk, received);
}

absl::Status JobShard::CheckHeader(const PushStream& stream, const wire::FrameHeader& header) const {
  if (header.kind != wire::FrameKind::kPush && header.kind != wire::FrameKind::kInitialize) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a frame of kind %d cannot be pushed", static_cast<int>(header.kind)));
  }
  if (header.shard != shard_index_) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a frame for shard %d came to shard %d", header.shard, shard_index_));
  }
  if (header.incarnation != stream.incarnation) {
    return absl::InvalidArgumentError(absl::StrFormat("a frame of incarnation %016x on a stream of incarnation %016x",
                                                      header.incarnation, stream.incarnation));
  }
  if ((header.flags & wire::kNonFinite) != 0 && ((header.flags & wire::kAbstain) == 0 || !SkipsNonFinite(job_))) {
    return absl::InvalidArgumentError(
        "a frame says that its gradient is not finite, which those do that abstain, in jobs that skip such rounds");
  }
  const uint16_t replaces = wire::kAbstain | wire::kReplace;
  if ((header.flags & wire::kReplace) != 0 &&
      (header.kind != wire::FrameKind::kPush || (header.flags & (replaces | wire::kNonFinite)) != replaces)) {
    return absl::InvalidArgumentError("a frame says that it replaces parameters, which those do that abstain");
  }
  const uint32_t expected = buckets_[header.bucket]->layout->shape_digest;
  if (header.shape_digest != expected) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the frame was made for another layout (shape digest 0x%08x, this bucket has 0x%08x): its tensors, "
        "shapes, dtypes or codec differ from the job's",
        header.shape_digest, expected));
  }
  return absl::OkStatus();
}

OpenRound* JobShard::PlaceOf(BucketState& bucket, uint64_t round) const {
  return IsAsync(job_) ? bucket.open.data() : bucket.Find(round);
}

JobShard::Ack JobShard::PushFrame(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  BucketState& bucket = *buckets_[header.bucket];
  RoundActions actions;
  absl::StatusOr<PushVerdict> verdict = PushVerdict::kAccept;
  bool complete = false;
  uint32_t digest = 0;
  {
    absl::MutexLock lock(&bucket.mu);
    OpenRound* const open = PlaceOf(bucket, header.round);
    const bool begun = open != nullptr && open->partial.contains(stream.member);
    if (header.chunk == 0 || !begun) verdict = Begin(bucket, open, stream, header);
    if (verdict.ok() && *verdict == PushVerdict::kDuplicate) digest = ExtendDigest(chunk, 0);
    if (verdict.ok() && *verdict == PushVerdict::kAccept) {
      verdict = IsAsync(job_) ? Hold(bucket, stream, chunk, received, &actions, &complete)
                              : Merge(bucket, *open, stream, chunk, received, &actions, &complete);
      if (!verdict.ok()) AbandonPartial(bucket, *open, stream.member);
    }
  }
  // The update goes out before the acknowledgement: pullers wait for it, nobody waits for the latter alone.
  Run(actions);
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  if (*verdict == PushVerdict::kDuplicate && !complete) {
    absl::Status same;
    if (IsLast(header)) {
      absl::MutexLock lock(&mu_);
      same = machine_.Repeat(stream.member, header.bucket, header.round, digest);
    } else {
      stream.skipped[header.bucket] = {.round = header.round, .digest = digest};
      return std::nullopt;
    }
    if (!same.ok()) return Refuse(stream, header, same);
  }
  if (*verdict == PushVerdict::kAccept && !complete) return std::nullopt;
  if (*verdict == PushVerdict::kNotIncluded && !IsLast(header)) {
    stream.skipped[header.bucket] = {.round = header.round, .not_included = true};
    return std::nullopt;
  }
  const bool made = IsAsync(job_) && *verdict == PushVerdict::kAccept;
  return Acknowledge(stream, header, *verdict, made ? actions.close.back().round + 1 : 0);
}

absl::Status JobShard::StillFinishing(const BucketState& bucket, uint64_t round) const {
  return absl::FailedPreconditionError(absl::StrFormat(
      "a frame of round %d, but this bucket is still finishing round %d: pull version %d of every bucket first", round,
      bucket.version, PlanVersion(job_, round)));
}

absl::StatusOr<PushVerdict> JobShard::Begin(BucketState& bucket, OpenRound* open, PushStream& stream,
                                            const wire::FrameHeader& header) {
  // A frame that starts anew replaces its unfinished beginning.
  if (open != nullptr) AbandonPartial(bucket, *open, stream.member);
  PushVerdict verdict;
  {
    absl::MutexLock lock(&mu_);
    GW_ASSIGN_OR_RETURN(verdict, machine_.Classify(stream.member, header.bucket, header.round));
    machine_.Renew(stream.member, environment_.clock->Now());
  }
  if (verdict != PushVerdict::kAccept) return verdict;
  if (header.chunk != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk %d of a frame whose beginning is not here: send the frame from chunk 0", header.chunk));
  }
  GW_RETURN_IF_ERROR(bucket.failure);
  if (IsAsync(job_)) {
    open->partial[stream.member].stream = &stream;
    return verdict;
  }
  if (open == nullptr) {
    return StillFinishing(bucket, header.round);
  }
  const bool replaces = (header.flags & wire::kReplace) != 0;
  GW_RETURN_IF_ERROR(CheckUnmixed(*open, replaces));
  PartialFrame& partial = open->partial[stream.member];
  partial.stream = &stream;
  if (replaces) return verdict;
  partial.assembler = std::make_unique<FrameAssembler>(bucket.codec.get(), bucket.layout, open->accumulator.get(),
                                                       bucket.plans.OfRound(job_, header.round), header.round,
                                                       environment_.frame_limit_bytes);
  return verdict;
}

absl::Status JobShard::CheckInFlight(uint64_t chunk_bytes) const {
  // Sound without a lock: the bound may be passed by one chunk per transport thread.
  const uint64_t limit = memory_.in_flight + environment_.frame_limit_bytes;
  if (in_flight_bytes_ + chunk_bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%d bytes of unfinished frames are held for this job, its limit is %d: push fewer buckets at once",
      in_flight_bytes_.load(), limit));
}

absl::StatusOr<PushVerdict> JobShard::Merge(BucketState& bucket, OpenRound& open, PushStream& stream,
                                            const wire::Chunk& chunk, std::span<const Bytes> received,
                                            RoundActions* actions, bool* complete) {
  const wire::FrameHeader& header = chunk.header;
  PartialFrame& partial = open.partial.at(stream.member);
  const uint64_t chunk_bytes = chunk.bytes.size();
  GW_RETURN_IF_ERROR(CheckInFlight(chunk_bytes));
  GW_RETURN_IF_ERROR(partial.assembler->Add(chunk, received));
  GW_FAILPOINT("push.chunk_merged");
  partial.held_bytes += chunk_bytes;
  in_flight_bytes_ += chunk_bytes;
  if (!partial.assembler->complete()) {
    if (!IsLast(header)) return PushVerdict::kAccept;
    return absl::InvalidArgumentError("the last chunk came, but the frame does not cover its bucket");
  }
  GW_RETURN_IF_ERROR(CheckUnmixed(open, false));
  const std::span<const float> rates = partial.assembler->learning_rates();
  open.learning_rates.reserve(rates.size());
  PushVerdict verdict;
  bool takes_rates = false;
  {
    absl::MutexLock lock(&mu_);
    GW_ASSIGN_OR_RETURN(takes_rates, FixLearningRates(open, stream.member, *partial.assembler));
    GW_ASSIGN_OR_RETURN(verdict, machine_.Complete(stream.member, header.bucket, header.round,
                                                   partial.assembler->digest(), environment_.clock->Now(), actions));
    machine_.Renew(stream.member, environment_.clock->Now());
    if (verdict == PushVerdict::kAccept) ++totals_[stream.member].frames;
  }
  *complete = true;
  if (verdict == PushVerdict::kAccept) {
    if (takes_rates) {
      open.learning_rates.assign(rates.begin(), rates.end());
      open.rates_of = stream.member;
    }
    partial.assembler->Commit();
    ++open.committed;
    in_flight_bytes_ -= partial.held_bytes;
    open.partial.erase(stream.member);
  } else {
    AbandonPartial(bucket, open, stream.member);
  }
  return verdict;
}

absl::StatusOr<bool> JobShard::FixLearningRates(const OpenRound& open, MemberId member, const FrameAssembler& frame) {
  const std::span<const float> rates = frame.learning_rates();
  const size_t groups = static_cast<size_t>(job_.spec().optimizer().groups_size());
  if (rates.size() != groups) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the frame carries %d learning rates; the job has %d parameter groups", rates.size(), groups));
  }
  if (const auto totals = totals_.find(member); totals != totals_.end() && !totals->second.other_rates.ok()) {
    return std::exchange(totals->second.other_rates, absl::OkStatus());
  }
  if (open.learning_rates.empty()) return true;
  // A worker that skipped rounds may be behind in its schedule: with a quorum the first frame decides for all.
  if (job_.spec().rounds().quorum() > 0) return false;
  if (std::equal(rates.begin(), rates.end(), open.learning_rates.begin())) return false;
  // A worker that was started anew has its schedule begin anew: that ends it, and not those who are in the job since.
  const Member* const mine = machine_.membership().Get(member);
  const Member* const theirs = machine_.membership().Get(open.rates_of);
  if (mine == nullptr || theirs == nullptr) return true;  // it has gone
  if (theirs->sequence < mine->sequence) return OtherRates(rates, open.learning_rates, theirs->worker);
  totals_[theirs->id].other_rates = OtherRates(open.learning_rates, rates, mine->worker);
  return true;
}

absl::Status JobShard::OtherRates(std::span<const float> rates, std::span<const float> others, const std::string& of) {
  size_t g = 0;
  while (rates[g] == others[g]) ++g;
  return absl::InvalidArgumentError(absl::StrFormat(
      "learning rate %.9g of group %d differs from %.9g of worker '%s', which is in the job for longer: every worker must "
      "follow the same schedule; one that comes in later goes on with it where the others are (Session.start_version)",
      rates[g], g, others[g], of));
}

JobShard::Ack JobShard::PushSkipped(PushStream& stream, const wire::Chunk& chunk, PushStream::Skipped skipped) {
  skipped.digest = ExtendDigest(chunk, skipped.digest);
  stream.skipped[chunk.header.bucket] = skipped;
  if (!IsLast(chunk.header)) return std::nullopt;
  stream.skipped.erase(chunk.header.bucket);
  if (skipped.answered) return std::nullopt;
  if (chunk.header.kind == wire::FrameKind::kInitialize) return RepeatInitialize(stream, chunk.header, skipped.digest);
  if (skipped.not_included) return Acknowledge(stream, chunk.header, PushVerdict::kNotIncluded);
  absl::Status same;
  {
    absl::MutexLock lock(&mu_);
    same = machine_.Repeat(stream.member, chunk.header.bucket, chunk.header.round, skipped.digest);
  }
  if (!same.ok()) return Refuse(stream, chunk.header, same);
  return Acknowledge(stream, chunk.header, PushVerdict::kDuplicate);
}

JobShard::Ack JobShard::PushAbstain(PushStream& stream, const wire::FrameHeader& header) {
  const bool nonfinite = (header.flags & wire::kNonFinite) != 0;
  RoundActions actions;
  absl::StatusOr<PushVerdict> verdict = PushVerdict::kAccept;
  {
    BucketState& bucket = *buckets_[header.bucket];
    absl::MutexLock lock(&bucket.mu);
    OpenRound* const open = bucket.Find(header.round);
    absl::MutexLock job_lock(&mu_);
    const TimeNs now = environment_.clock->Now();
    if (nonfinite && open == nullptr) {
      verdict = machine_.Classify(stream.member, header.bucket, header.round);
      if (verdict.ok() && *verdict == PushVerdict::kAccept) verdict = StillFinishing(bucket, header.round);
    } else if (nonfinite && open->replacement) {
      verdict = CheckUnmixed(*open, false);
    } else {
      verdict = machine_.Abstain(stream.member, header.bucket, header.round, now, &actions);
      // Its bucket closes with `actions`, if not later.
      if (nonfinite && verdict.ok() && *verdict == PushVerdict::kAccept) open->nonfinite = true;
    }
    machine_.Renew(stream.member, now);
  }
  Run(actions);
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  return Acknowledge(stream, header, *verdict);
}

JobShard::Ack JobShard::Refuse(PushStream& stream, const wire::FrameHeader& header, const absl::Status& why) {
  ++refused_frames_;
  // What follows of this frame is dropped without another answer.
  if (!IsLast(header)) stream.skipped[header.bucket] = {.round = header.round, .answered = true};
  BucketState& bucket = *buckets_[header.bucket];
  RoundActions actions;
  {
    absl::MutexLock lock(&bucket.mu);
    if (OpenRound* const open = PlaceOf(bucket, header.round); open != nullptr) {
      const auto partial = open->partial.find(stream.member);
      if (partial != open->partial.end() && partial->second.stream == &stream) {
        AbandonPartial(bucket, *open, stream.member);
      }
    }
  }
  if (header.kind == wire::FrameKind::kPush) {
    absl::MutexLock lock(&mu_);
    // The others do not wait for a contribution that was refused. Fails where nobody waits for it anyway.
    machine_.Abstain(stream.member, header.bucket, header.round, environment_.clock->Now(), &actions).IgnoreError();
  }
  Run(actions);
  v1::PushAck ack;
  ack.set_bucket(header.bucket);
  ack.set_round(header.round);
  ack.set_outcome(v1::PUSH_REFUSED);
  ack.set_code(static_cast<int>(why.code()));
  ack.set_message(absl::StrFormat("job '%s' round %d bucket %d worker '%s': %s", job_.spec().name(), header.round,
                                  header.bucket, stream.worker, std::string(why.message())));
  WarnRefused(why.code(), ack.message());
  return ack;
}

JobShard::Ack JobShard::Acknowledge(PushStream& stream, const wire::FrameHeader& header, PushVerdict verdict,
                                    uint64_t made) {
  v1::PushAck ack;
  if (IsAsync(job_) && header.kind == wire::FrameKind::kPush && verdict == PushVerdict::kDuplicate) {
    absl::MutexLock lock(&mu_);
    made = machine_.NextVersionOf(header.bucket);
  }
  ack.set_made(made);
  if (verdict == PushVerdict::kNotIncluded) {
    ++not_included_frames_;
    // It lost against a version that may not be there yet.
    if (IsAsync(job_)) ack.set_made(header.round + 1);
    absl::MutexLock lock(&mu_);
    machine_.NoteLate(stream.member, header.round, environment_.clock->Now());
    ack.set_open_round(machine_.round());
  }
  if (!IsLast(header)) stream.skipped[header.bucket] = {.round = header.round, .answered = true};
  ack.set_bucket(header.bucket);
  ack.set_round(header.round);
  ack.set_outcome(OutcomeOf(verdict));
  return ack;
}

JobShard::Ack JobShard::PushInitialize(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  const uint64_t size = TotalSize(received);
  BucketState& bucket = *buckets_[header.bucket];
  absl::Status status;
  RoundActions actions;
  bool complete = false;
  bool repeat = false;
  journal::Record record;
  {
    absl::MutexLock lock(&bucket.mu);
    {
      // Judged while the bucket is held: a worker that is lost in between cannot overwrite its successor's values.
      absl::MutexLock job_lock(&mu_);
      status = machine_.CheckInitializer(stream.member, header.bucket);
      machine_.Renew(stream.member, environment_.clock->Now());
    }
    repeat = absl::IsAlreadyExists(status) && bucket.initializer == stream.member;
    if (header.chunk == 0 || !status.ok() || bucket.initializing_stream != &stream) {
      in_flight_bytes_ -= TotalSize(bucket.initial_chunks);
      bucket.initial_chunks.clear();
      bucket.initializing_stream = &stream;
      if (status.ok()) bucket.initial_digest = 0;
    }
    const uint64_t held = TotalSize(bucket.initial_chunks) + size;
    const uint64_t most = std::min(environment_.frame_limit_bytes, MaxUploadBytes(bucket.layout->elements));
    if (status.ok() && held > most) {
      status = absl::ResourceExhaustedError(absl::StrFormat(
          "initial parameters of %d bytes and more; those of %d elements take at most %d, and one frame at most %d "
          "(--frame-limit-bytes)",
          held, bucket.layout->elements, MaxUploadBytes(bucket.layout->elements), environment_.frame_limit_bytes));
    }
    if (status.ok()) {
      bucket.initial_chunks.push_back(wire::Flatten(received));
      bucket.initial_digest = ExtendDigest(chunk, bucket.initial_digest);
      in_flight_bytes_ += size;
    }
    if (!status.ok() || IsLast(header)) {
      const std::vector<Bytes> chunks = std::move(bucket.initial_chunks);
      bucket.initial_chunks.clear();
      bucket.initializing_stream = nullptr;
      in_flight_bytes_ -= TotalSize(chunks);
      if (status.ok()) {
        status = bucket.store->Initialize(chunks);
        complete = status.ok();
      }
      if (complete) {
        bucket.initializer = stream.member;
        ++bucket.unwritten_initials;
        bucket.uploader = sink_ == nullptr ? nullptr : stream.out;
        record = {journal::RecordType::kInitial, header.bucket, 0, {}, chunks};
        absl::MutexLock job_lock(&mu_);
        ++unwritten_initials_;
        machine_.Initialized(stream.member, header.bucket, environment_.clock->Now(), &actions);
      }
    }
  }
  if (repeat) {
    const uint32_t digest = ExtendDigest(chunk, 0);
    if (IsLast(header)) return RepeatInitialize(stream, header, digest);
    stream.skipped[header.bucket] = {.round = header.round, .digest = digest};
    return std::nullopt;
  }
  if (!status.ok()) return Refuse(stream, header, status);
  if (!complete) return std::nullopt;
  GW_FAILPOINT("initialize.before_journal");
  // Before any update of this bucket, which can only follow from `actions`.
  if (sink_ != nullptr) {
    sink_->Append(std::move(record), [this, b = header.bucket] { NoteInitialWritten(b); });
  } else {
    NoteInitialWritten(header.bucket);
  }
  GW_FAILPOINT("initialize.between_buckets");
  Run(actions);
  if (sink_ != nullptr) return std::nullopt;
  return Acknowledge(stream, header, PushVerdict::kAccept);
}

JobShard::Ack JobShard::RepeatInitialize(PushStream& stream, const wire::FrameHeader& header, uint32_t digest) {
  BucketState& bucket = *buckets_[header.bucket];
  absl::Status same;
  {
    absl::MutexLock lock(&bucket.mu);
    if (digest != bucket.initial_digest) {
      same = absl::FailedPreconditionError(absl::StrFormat(
          "initial parameters with digest 0x%08x are here, these have 0x%08x: a repeat must be the same "
          "bytes; pull them",
          bucket.initial_digest, digest));
    } else if (bucket.unwritten_initials > 0) {
      bucket.uploader = stream.out;
      return std::nullopt;
    }
  }
  if (!same.ok()) return Refuse(stream, header, same);
  return Acknowledge(stream, header, PushVerdict::kDuplicate);
}

void JobShard::NoteInitialWritten(uint32_t index) {
  std::shared_ptr<Outbox> uploader;
  {
    BucketState& bucket = *buckets_[index];
    absl::MutexLock lock(&bucket.mu);
    if (--bucket.unwritten_initials == 0) uploader = std::move(bucket.uploader);
  }
  bool complete = false;
  {
    absl::MutexLock lock(&mu_);
    complete = --unwritten_initials_ == 0 && machine_.initialized();
  }
  std::vector<Delivery> ready;
  for (const auto& bucket : buckets_) {
    if (!complete) break;
    absl::MutexLock lock(&bucket->mu);
    bucket->ready = true;
    for (Delivery& delivery : TakeReady(*bucket)) ready.push_back(std::move(delivery));
  }
  if (uploader != nullptr) {
    v1::PushAck ack;
    ack.set_bucket(index);
    ack.set_outcome(v1::PUSH_INCLUDED);
    uploader->Send({ack.SerializeAsString(), {}}).IgnoreError();  // it fails only when the stream is closing
  }
  Deliver(std::move(ready));
}

}  // namespace gradwire
