// See initial_upload.h.
#include "server/flow/initial_upload.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "server/flow/flow.h"

namespace gradwire {

InitialUpload::Taken InitialUpload::Take(PushStream& stream, const wire::Chunk& chunk,
                                         std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  BucketState& bucket = *parts_.buckets[header.bucket];
  absl::Status status;
  RoundActions actions;
  journal::Record record;
  bool complete = false;
  bool repeat = false;
  {
    absl::MutexLock lock(&bucket.mu);
    Upload& upload = bucket.upload;
    {
      // Judged while the bucket is held: a worker that is lost in between cannot overwrite its successor's values.
      absl::MutexLock job_lock(&parts_.mu);
      status = parts_.rounds->CheckInitializer(stream.member, header.bucket);
      parts_.rounds->Renew(stream.member, parts_.environment.clock->Now());
    }
    repeat = absl::IsAlreadyExists(status) && upload.worker == stream.member;
    // What others send, and this worker's former stream, leaves what is here as it is.
    const bool superseded = status.ok() && upload.from == stream.member && upload.stream > stream.number;
    if (status.ok() && !superseded) {
      if (header.chunk == 0) {
        TakeKept(bucket);
        upload.stream = stream.number;
        upload.from = stream.member;
        upload.digest = 0;
      }
      status = upload.stream == stream.number
                   ? Keep(bucket, chunk, received)
                   : absl::InvalidArgumentError(absl::StrFormat(
                         "chunk %d of parameters whose beginning is not here: send them from chunk 0", header.chunk));
      if (upload.stream == stream.number && (!status.ok() || IsLast(header))) {
        std::vector<Bytes> chunks = TakeKept(bucket);
        upload.stream = 0;
        if (status.ok()) {
          status = Complete(bucket, stream, std::move(chunks), &record, &actions);
          complete = status.ok();
        }
      }
    }
  }
  if (repeat) {
    const uint32_t digest = ExtendDigest(chunk, 0);
    if (IsLast(header)) return Repeat(stream, header.bucket, digest);
    stream.skipped[header.bucket] = {.round = header.round, .digest = digest};
    return std::nullopt;
  }
  GW_RETURN_IF_ERROR(status);
  if (!complete) return std::nullopt;
  GW_FAILPOINT("initialize.before_journal");
  // Before any update of this bucket, which can only follow from `actions`.
  if (log_.journals()) {
    log_.Append(std::move(record), [this, b = header.bucket] { NoteSafe(b); });
  } else {
    NoteSafe(header.bucket);
  }
  GW_FAILPOINT("initialize.between_buckets");
  parts_.run(std::move(actions));
  if (log_.journals()) return std::nullopt;
  return PushVerdict::kAccept;
}

absl::Status InitialUpload::Keep(BucketState& bucket, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const uint64_t frame_limit = parts_.environment.frame_limit_bytes;
  const uint64_t size = TotalSize(received);
  const uint64_t held = TotalSize(bucket.upload.chunks) + size;
  const uint64_t most = MaxUploadBytes(bucket.layout->elements);
  if (held > std::min(frame_limit, most)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "initial parameters of %d bytes and more; those of %d elements take at most %d, and one frame at most %d "
        "(--frame-limit-bytes)",
        held, bucket.layout->elements, most, frame_limit));
  }
  bucket.upload.chunks.push_back(wire::Flatten(received));
  bucket.upload.digest = ExtendDigest(chunk, bucket.upload.digest);
  parts_.in_flight.Add(size);
  return absl::OkStatus();
}

std::vector<Bytes> InitialUpload::TakeKept(BucketState& bucket) {
  std::vector<Bytes> chunks = std::move(bucket.upload.chunks);
  bucket.upload.chunks.clear();
  parts_.in_flight.Return(TotalSize(chunks));
  return chunks;
}

absl::Status InitialUpload::Complete(BucketState& bucket, const PushStream& stream, std::vector<Bytes> chunks,
                                     journal::Record* record, RoundActions* actions) {
  GW_RETURN_IF_ERROR(bucket.store->Initialize(chunks));
  const uint32_t index = bucket.layout->bucket;
  bucket.upload.worker = stream.member;
  ++bucket.upload.unsafe;
  bucket.upload.asks = log_.journals() ? stream.out : nullptr;
  *record = {journal::RecordType::kInitial, index, 0, {}, std::move(chunks)};
  absl::MutexLock job_lock(&parts_.mu);
  ++unsafe_;
  parts_.rounds->Initialized(stream.member, index, parts_.NowOfRounds(), actions);
  return absl::OkStatus();
}

InitialUpload::Taken InitialUpload::Repeat(const PushStream& stream, uint32_t index, uint32_t digest) {
  BucketState& bucket = *parts_.buckets[index];
  absl::MutexLock lock(&bucket.mu);
  if (digest != bucket.upload.digest) {
    return absl::FailedPreconditionError(
        absl::StrFormat("initial parameters with digest 0x%08x are here, these have 0x%08x: a repeat must be the same "
                        "bytes; pull them",
                        bucket.upload.digest, digest));
  }
  if (bucket.upload.unsafe == 0) return PushVerdict::kDuplicate;
  bucket.upload.asks = stream.out;
  return std::nullopt;
}

void InitialUpload::Abandon(BucketState& bucket, const PushStream& stream) {
  if (bucket.upload.stream == stream.number) {
    TakeKept(bucket);
    bucket.upload.stream = 0;
  }
  if (bucket.upload.asks == stream.out) bucket.upload.asks = nullptr;
}

void InitialUpload::NoteSafe(uint32_t index) {
  std::shared_ptr<Outbox> asks;
  {
    BucketState& bucket = *parts_.buckets[index];
    absl::MutexLock lock(&bucket.mu);
    if (--bucket.upload.unsafe == 0) asks = std::move(bucket.upload.asks);
  }
  bool complete = false;
  {
    absl::MutexLock lock(&parts_.mu);
    complete = --unsafe_ == 0 && parts_.rounds->initialized();
  }
  std::vector<Delivery> ready;
  for (const auto& bucket : parts_.buckets) {
    if (!complete) break;
    absl::MutexLock lock(&bucket->mu);
    bucket->ready = true;
    for (Delivery& delivery : desk_.TakeReady(*bucket)) ready.push_back(std::move(delivery));
  }
  if (asks != nullptr) {
    v1::PushAck ack;
    ack.set_bucket(index);
    ack.set_outcome(v1::PUSH_INCLUDED);
    asks->Send({ack.SerializeAsString(), {}}).IgnoreError();  // it fails only when the stream is closing
  }
  desk_.Deliver(std::move(ready));
}

}  // namespace gradwire
