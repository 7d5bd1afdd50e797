// See intake.h.
#include "server/flow/intake.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "server/flow/open_rounds.h"

namespace gradwire {
namespace {

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

absl::StatusOr<std::optional<v1::PushAck>> Intake::Take(PushStream& stream, std::span<const Bytes> received) {
  // Joined where the thread joined the chunk before: that memory is in its core's cache. It grows to the largest
  // message that the transport takes.
  thread_local std::vector<uint8_t> scratch;
  const uint64_t size = TotalSize(received);
  {
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
  }
  parts_.traffic.NoteChunk(stream.member, size);
  const absl::StatusOr<wire::Chunk> chunk = wire::ParseReceived(received, &scratch);
  if (!chunk.ok()) {
    // Damaged on its way, most likely: as on a connection that was cut, the frame comes again on the worker's next
    // stream. The round waits for it: what it carries is not lost.
    parts_.traffic.NoteRefused();
    return absl::Status(
        chunk.status().code(),
        absl::StrFormat("job '%s' worker '%s': %s; open a new stream and push again", parts_.job.spec().name(),
                        stream.worker, std::string(chunk.status().message())));
  }
  const wire::FrameHeader header = chunk->header;
  if (header.kind == wire::FrameKind::kInitialize) {
    parts_.traffic.NoteUpload(size);
  } else {
    parts_.traffic.NotePush(size);
  }
  if (header.bucket >= parts_.buckets.size()) {
    parts_.traffic.NoteRefused();
    return absl::InvalidArgumentError(absl::StrFormat("job '%s' worker '%s': bucket %d does not exist: this job has %d",
                                                      parts_.job.spec().name(), stream.worker, header.bucket,
                                                      parts_.buckets.size()));
  }
  const auto skipped = stream.skipped.find(header.bucket);
  if (skipped != stream.skipped.end()) {
    if (header.chunk != 0 && header.round == skipped->second.round) {
      return TakeSkipped(stream, *chunk, skipped->second);
    }
    stream.skipped.erase(skipped);
  }
  if (absl::Status status = CheckHeader(stream, header); !status.ok()) return Refuse(stream, header, status);
  const TraceSpan span(&parts_.trace, {.stage = v1::TRACE_MERGE,
                                       .round = header.round,
                                       .bucket = header.bucket,
                                       .member = stream.member,
                                       .bytes = size});
  if (header.kind == wire::FrameKind::kInitialize) {
    return AnswerUpload(stream, header, upload_.Take(stream, *chunk, received));
  }
  if ((header.flags & wire::kReplace) != 0) return TakeReplacement(stream, *chunk, received);
  if ((header.flags & wire::kAbstain) != 0) return TakeAbstention(stream, header);
  return TakeFrame(stream, *chunk, received);
}

absl::Status Intake::CheckHeader(const PushStream& stream, const wire::FrameHeader& header) const {
  if (header.kind != wire::FrameKind::kPush && header.kind != wire::FrameKind::kInitialize) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a frame of kind %d cannot be pushed", static_cast<int>(header.kind)));
  }
  if (header.shard != parts_.shard_index) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a frame for shard %d came to shard %d", header.shard, parts_.shard_index));
  }
  if (header.incarnation != stream.incarnation) {
    return absl::InvalidArgumentError(absl::StrFormat("a frame of incarnation %016x on a stream of incarnation %016x",
                                                      header.incarnation, stream.incarnation));
  }
  if ((header.flags & wire::kNonFinite) != 0 && ((header.flags & wire::kAbstain) == 0 || !SkipsNonFinite(parts_.job))) {
    return absl::InvalidArgumentError(
        "a frame says that its gradient is not finite, which those do that abstain, in jobs that skip such rounds");
  }
  const uint16_t replaces = wire::kAbstain | wire::kReplace;
  if ((header.flags & wire::kReplace) != 0 &&
      (header.kind != wire::FrameKind::kPush || (header.flags & (replaces | wire::kNonFinite)) != replaces)) {
    return absl::InvalidArgumentError("a frame says that it replaces parameters, which those do that abstain");
  }
  const uint32_t expected = parts_.buckets[header.bucket]->layout->shape_digest;
  if (header.shape_digest != expected) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the frame was made for another layout (shape digest 0x%08x, this bucket has 0x%08x): its tensors, "
        "shapes, dtypes or codec differ from the job's",
        header.shape_digest, expected));
  }
  return absl::OkStatus();
}

Intake::Ack Intake::TakeFrame(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  BucketState& bucket = *parts_.buckets[header.bucket];
  RoundActions actions;
  absl::StatusOr<PushVerdict> verdict = PushVerdict::kAccept;
  bool complete = false;
  uint32_t digest = 0;
  {
    absl::MutexLock lock(&bucket.mu);
    OpenRound* const open = flow_.PlaceOf(bucket, header.round);
    if (IsSuperseded(stream, open)) return Drop(stream, header);
    const bool begun = HasBegun(stream, /*replaces=*/false, open);
    if (header.chunk == 0 || !begun) verdict = flow_.Begin(bucket, open, stream, header);
    if (verdict.ok() && *verdict == PushVerdict::kDuplicate) digest = ExtendDigest(chunk, 0);
    if (verdict.ok() && *verdict == PushVerdict::kAccept) {
      verdict = flow_.Take(bucket, *open, stream, chunk, received, &actions, &complete);
      if (!verdict.ok()) AbandonPartial(bucket, *open, stream.member, &parts_.in_flight);
    }
  }
  const std::optional<uint64_t> closed = actions.last_closed();
  // The update goes out before the acknowledgement: pullers wait for it, nobody waits for the latter alone.
  parts_.run(std::move(actions));
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  if (*verdict == PushVerdict::kNotIncluded && !IsLast(header)) {
    stream.skipped[header.bucket] = {.round = header.round, .not_included = true};
    return std::nullopt;
  }
  if (complete || *verdict == PushVerdict::kNotIncluded) return AckOf(stream, header, *verdict, closed);
  if (*verdict == PushVerdict::kAccept) return std::nullopt;
  if (IsLast(header)) return TakeRepeat(stream, header, digest);
  stream.skipped[header.bucket] = {.round = header.round, .digest = digest};
  return std::nullopt;
}

Intake::Ack Intake::TakeSkipped(PushStream& stream, const wire::Chunk& chunk, PushStream::Skipped skipped) {
  skipped.digest = ExtendDigest(chunk, skipped.digest);
  const wire::FrameHeader& header = chunk.header;
  stream.skipped[header.bucket] = skipped;
  if (!IsLast(header)) return std::nullopt;
  stream.skipped.erase(header.bucket);
  if (skipped.answered) return std::nullopt;
  if (header.kind == wire::FrameKind::kInitialize) {
    return AnswerUpload(stream, header, upload_.Repeat(stream, header.bucket, skipped.digest));
  }
  if (skipped.not_included) return AckOf(stream, header, PushVerdict::kNotIncluded);
  return TakeRepeat(stream, header, skipped.digest);
}

Intake::Ack Intake::TakeRepeat(PushStream& stream, const wire::FrameHeader& header, uint32_t digest) {
  absl::Status same;
  {
    absl::MutexLock lock(&parts_.mu);
    same = parts_.rounds->Repeat(stream.member, header.bucket, header.round, digest);
  }
  if (!same.ok()) return Refuse(stream, header, same);
  return AckOf(stream, header, PushVerdict::kDuplicate);
}

Intake::Ack Intake::Drop(PushStream& stream, const wire::FrameHeader& header) {
  if (!IsLast(header)) stream.skipped[header.bucket] = {.round = header.round, .answered = true};
  return std::nullopt;
}

Intake::Ack Intake::TakeReplacement(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  {
    BucketState& bucket = *parts_.buckets[header.bucket];
    absl::MutexLock lock(&bucket.mu);
    if (IsSuperseded(stream, bucket.Find(header.round))) return Drop(stream, header);
  }
  RoundActions actions;
  const absl::StatusOr<PushVerdict> verdict = replacement_.Take(stream, chunk, received, &actions);
  const std::optional<uint64_t> closed = actions.last_closed();
  parts_.run(std::move(actions));
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  if (IsLast(header)) return AckOf(stream, header, *verdict, closed);
  if (*verdict == PushVerdict::kNotIncluded) {
    stream.skipped[header.bucket] = {.round = header.round, .not_included = true};
  }
  return std::nullopt;
}

Intake::Ack Intake::TakeAbstention(PushStream& stream, const wire::FrameHeader& header) {
  const bool nonfinite = (header.flags & wire::kNonFinite) != 0;
  RoundActions actions;
  absl::StatusOr<PushVerdict> verdict = PushVerdict::kAccept;
  {
    BucketState& bucket = *parts_.buckets[header.bucket];
    absl::MutexLock lock(&bucket.mu);
    OpenRound* const open = bucket.Find(header.round);
    absl::MutexLock job_lock(&parts_.mu);
    const TimeNs now = parts_.NowOfRounds();
    if (nonfinite && open == nullptr) {
      verdict = parts_.rounds->Classify(stream.member, header.bucket, header.round);
      if (verdict.ok() && *verdict == PushVerdict::kAccept) verdict = StillFinishing(parts_.job, bucket, header.round);
    } else if (nonfinite && open->replacement) {
      verdict = CheckUnmixed(*open, false);
    } else {
      verdict = parts_.rounds->Abstain(stream.member, header.bucket, header.round, now, &actions);
      // Its bucket closes with `actions`, if not later.
      if (nonfinite && verdict.ok() && *verdict == PushVerdict::kAccept) open->nonfinite = true;
    }
    parts_.rounds->Renew(stream.member, now);
  }
  const std::optional<uint64_t> closed = actions.last_closed();
  parts_.run(std::move(actions));
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  return AckOf(stream, header, *verdict, closed);
}

Intake::Ack Intake::AnswerUpload(PushStream& stream, const wire::FrameHeader& header,
                                 const InitialUpload::Taken& taken) {
  if (!taken.ok()) return Refuse(stream, header, taken.status());
  return *taken ? AckOf(stream, header, **taken) : std::nullopt;
}

Intake::Ack Intake::Refuse(PushStream& stream, const wire::FrameHeader& header, const absl::Status& why) {
  parts_.traffic.NoteRefused();
  // What follows of this frame is dropped without another answer.
  if (!IsLast(header)) stream.skipped[header.bucket] = {.round = header.round, .answered = true};
  BucketState& bucket = *parts_.buckets[header.bucket];
  RoundActions actions;
  {
    absl::MutexLock lock(&bucket.mu);
    if (OpenRound* const open = flow_.PlaceOf(bucket, header.round); open != nullptr) {
      const auto partial = open->partial.find(stream.member);
      if (partial != open->partial.end() && partial->second.stream == stream.number) {
        AbandonPartial(bucket, *open, stream.member, &parts_.in_flight);
      }
    }
  }
  if (header.kind == wire::FrameKind::kPush) {
    absl::MutexLock lock(&parts_.mu);
    // The others do not wait for a contribution that was refused. Fails where nobody waits for it anyway.
    parts_.rounds->Abstain(stream.member, header.bucket, header.round, parts_.NowOfRounds(), &actions).IgnoreError();
  }
  parts_.run(std::move(actions));
  v1::PushAck ack;
  ack.set_bucket(header.bucket);
  ack.set_round(header.round);
  ack.set_outcome(v1::PUSH_REFUSED);
  ack.set_abstained((header.flags & wire::kAbstain) != 0);
  ack.set_code(static_cast<int>(why.code()));
  ack.set_message(absl::StrFormat("job '%s' round %d bucket %d worker '%s': %s", parts_.job.spec().name(), header.round,
                                  header.bucket, stream.worker, std::string(why.message())));
  if (refusals_.Admit(why.code(), parts_.environment.clock->Now())) spdlog::warn("refused: {}", ack.message());
  return ack;
}

Intake::Ack Intake::AckOf(PushStream& stream, const wire::FrameHeader& header, PushVerdict verdict,
                          std::optional<uint64_t> closed) {
  v1::PushAck ack;
  if (header.kind == wire::FrameKind::kPush) ack.set_made(flow_.MadeBy(header, verdict, closed));
  if (verdict == PushVerdict::kNotIncluded) {
    parts_.traffic.NoteNotIncluded(stream.member);
    absl::MutexLock lock(&parts_.mu);
    parts_.rounds->NoteLate(stream.member, header.round, parts_.environment.clock->Now());
    ack.set_open_round(parts_.rounds->round());
  }
  if (!IsLast(header)) stream.skipped[header.bucket] = {.round = header.round, .answered = true};
  ack.set_bucket(header.bucket);
  ack.set_round(header.round);
  ack.set_outcome(OutcomeOf(verdict));
  ack.set_abstained((header.flags & wire::kAbstain) != 0);
  return ack;
}

void Intake::AbandonStream(const PushStream& stream) {
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    for (OpenRound& open : bucket->open) {
      const auto it = open.partial.find(stream.member);
      if (it == open.partial.end() || it->second.stream != stream.number) continue;
      AbandonPartial(*bucket, open, stream.member, &parts_.in_flight);
    }
    upload_.Abandon(*bucket, stream);
  }
}

void Intake::AbandonMember(MemberId member) {
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    {
      absl::MutexLock job_lock(&parts_.mu);
      if (parts_.rounds->membership().Get(member) != nullptr) return;  // it is back, and may have begun frames
    }
    for (OpenRound& open : bucket->open) AbandonPartial(*bucket, open, member, &parts_.in_flight);
  }
}

void Intake::WarnOfHeldBack(TimeNs now) {
  for (const WarningLimiter::Count& more : refusals_.TakeEnded(now)) {
    spdlog::warn("job {}: {} more frames refused with {} within 10 s", parts_.job.spec().name(), more.warnings,
                 absl::StatusCodeToString(more.kind));
  }
}

}  // namespace gradwire
