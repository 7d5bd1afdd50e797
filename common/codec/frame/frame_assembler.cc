// Merging a frame chunk by chunk, with a way back.
#include "common/codec/frame/frame_assembler.h"

#include <cmath>
#include <cstring>
#include <new>

#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

// What the begin of a segment counts: runs, cells, values of factors, or elements, whichever form these have.
size_t PlaceOf(wire::SegmentType type) {
  switch (type) {
    case wire::SegmentType::kRanges:
      return 0;
    case wire::SegmentType::kCells:
      return 1;
    case wire::SegmentType::kFactors:
      return 2;
    default:
      return 3;
  }
}

}  // namespace

uint32_t ExtendDigest(const wire::Chunk& chunk, uint32_t digest) {
  digest = Crc32c(chunk.bytes.span().first(wire::kHeaderBytes), digest);
  for (const wire::Segment& s : chunk.segments) {
    digest = Crc32c({s.data - wire::kSegmentHeaderBytes, wire::kSegmentHeaderBytes}, digest);
  }
  return digest;
}

FrameAssembler::FrameAssembler(const Codec* codec, const BucketLayout* layout, Accumulator* accumulator,
                               const RoundPlan* plan, uint64_t round, uint64_t frame_limit_bytes)
    : codec_(codec),
      layout_(layout),
      accumulator_(accumulator),
      merge_(accumulator->NewFrameMerge()),
      plan_(plan),
      plan_digest_(plan->Digest()),
      round_(round),
      frame_limit_bytes_(frame_limit_bytes) {}

FrameAssembler::~FrameAssembler() { Abandon(); }

absl::Status FrameAssembler::CheckIdentity(const wire::FrameHeader& h) const {
  if (h.kind != wire::FrameKind::kPush || h.bucket != layout_->bucket || h.shard != layout_->shard ||
      h.round != round_) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk of kind %d for bucket %d, shard %d, round %d does not belong to the frame of bucket %d, "
                        "shard %d, round %d",
                        static_cast<int>(h.kind), h.bucket, h.shard, h.round, layout_->bucket, layout_->shard, round_));
  }
  if (h.shape_digest != layout_->shape_digest) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "bucket %d: the frame was made for shape 0x%08x, this shard has 0x%08x; codec settings or shard map differ",
        h.bucket, h.shape_digest, layout_->shape_digest));
  }
  const bool abstain = (h.flags & wire::kAbstain) != 0;
  if (!abstain && h.plan_digest != plan_digest_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "bucket %d, round %d: the frame was encoded by plan 0x%08x, the round's plan is 0x%08x; pull the "
        "update of round %d first",
        h.bucket, h.round, h.plan_digest, plan_digest_, h.round == 0 ? 0 : h.round - 1));
  }
  if (h.chunk != chunks_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("bucket %d, round %d: chunk %d came where chunk %d was expected",
                                                      h.bucket, h.round, h.chunk, chunks_.size()));
  }
  return absl::OkStatus();
}

absl::Status FrameAssembler::Merge(const wire::Chunk& chunk) {
  segments_.reserve(segments_.size() + chunk.segments.size());
  for (const wire::Segment& s : chunk.segments) {
    if (s.type == wire::SegmentType::kLearningRates) {
      if (s.bytes != uint64_t{s.count} * 4 || s.begin != 0 || s.count == 0 || s.count > 64 ||
          !learning_rates_.empty()) {
        return absl::InvalidArgumentError("malformed learning rates");
      }
      learning_rates_.resize(s.count);
      std::memcpy(learning_rates_.data(), s.data, s.bytes);
      for (float rate : learning_rates_) {
        if (!std::isfinite(rate))
          return absl::InvalidArgumentError(absl::StrFormat("learning rate %g is not finite", rate));
      }
    } else {
      // Whether the frame is whole is known with its last chunk. Until then it takes no more of the room that all
      // workers' frames have together than a whole one.
      uint64_t& end = ends_[PlaceOf(s.type)];
      if (s.begin < end) {
        return absl::InvalidArgumentError(
            absl::StrFormat("bucket %d, round %d: a segment of type %d begins at %d, behind one that ends at %d",
                            layout_->bucket, round_, static_cast<int>(s.type), s.begin, end));
      }
      GW_RETURN_IF_ERROR(merge_ != nullptr ? merge_->Add(s) : accumulator_->Add(s));
      end = s.begin + s.count;
    }
    ++chunks_.back().merged;
    segments_.push_back(s);
  }
  return absl::OkStatus();
}

absl::Status FrameAssembler::Add(const wire::Chunk& chunk, std::span<const Bytes> received) {
  if (failed_ || complete_) return absl::InvalidArgumentError("chunk behind the end of its frame");
  absl::Status status = CheckIdentity(chunk.header);
  if (status.ok() && bytes_ + chunk.bytes.size() > frame_limit_bytes_) {
    status = absl::ResourceExhaustedError(
        absl::StrFormat("bucket %d, round %d: frame of more than %d bytes; the limit "
                        "is %d (frame_limit_bytes)",
                        layout_->bucket, round_, bytes_ + chunk.bytes.size() - 1, frame_limit_bytes_));
  }
  if (status.ok()) {
    bytes_ += chunk.bytes.size();
    digest_ = ExtendDigest(chunk, digest_);
    const bool hold = merge_ == nullptr || !merge_->revocable();
    chunks_.push_back({hold ? std::vector<Bytes>(received.begin(), received.end()) : std::vector<Bytes>()});
    status = Merge(chunk);
  }
  if (status.ok() && (chunk.header.flags & wire::kLastChunk) != 0) {
    abstained_ = (chunk.header.flags & wire::kAbstain) != 0;
    status = abstained_ ? (segments_.empty() ? absl::OkStatus()
                                             : absl::InvalidArgumentError("an abstaining frame carries segments"))
                        : codec_->CheckComplete(round_, *plan_, segments_);
    if (status.ok() && merge_ != nullptr) status = merge_->Settle();
    complete_ = status.ok();
  }
  if (!status.ok()) {
    Abandon();
    failed_ = true;
  }
  return status;
}

void FrameAssembler::Commit() {
  merge_.reset();
  chunks_.clear();
  segments_.clear();
}

void FrameAssembler::Abandon() {
  try {
    TakeOut();
  } catch (const std::bad_alloc&) {
    spoiled_ = true;
  }
  Commit();
}

// Parses once more: this is rare, and what a segment points to is not kept.
void FrameAssembler::TakeOut() {
  if (merge_ != nullptr && merge_->revocable()) return merge_->Revoke();
  std::vector<uint8_t> scratch;
  for (const Held& held : chunks_) {
    if (held.merged == 0) continue;
    const absl::StatusOr<wire::Chunk> chunk = wire::ParseReceived(held.received, &scratch);
    if (!chunk.ok()) {  // it was parsed before
      spoiled_ = true;
      return;
    }
    for (size_t i = 0; i < held.merged; ++i) {
      const wire::Segment& s = chunk->segments[i];
      if (s.type != wire::SegmentType::kLearningRates) accumulator_->Remove(s);
    }
  }
}

}  // namespace gradwire
