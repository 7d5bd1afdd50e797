// How the body of an update frame is read: what all kinds of bodies share, and what one codec knows of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/update/update.h"
#include "common/wire/frame.h"

namespace gradwire {

// Builds the body of an Update from the segments of its frame, in their order. Borrows both; not thread-safe. Errors:
// InvalidArgument.
class BodyBuilder {
 public:
  BodyBuilder(const BucketLayout* layout, Update* update) : layout_(*layout), update_(*update) {}

  const BucketLayout& layout() const { return layout_; }
  Update& update() { return update_; }

  // What the body consists of; the same for all of its segments.
  absl::Status Begin(Update::Body body);
  // Where segments cover the bucket once, in order: this one is next.
  absl::Status Advance(const wire::Segment& s);
  // Elements of a dense body; `values` lies wherever it likes.
  void AddPart(const wire::Segment& s, Bytes values);
  // The same of a part that travels in another form: where its s.count values go.
  float* NewPart(const wire::Segment& s);
  // What a segment of positions covers: it lies in the bucket, and behind those before.
  absl::Status CheckPositions(const wire::Segment& s, const std::vector<uint32_t>& before) const;
  // Appends the positions of an index.
  absl::Status AppendPositions(const wire::Segment& s, std::vector<uint32_t>* positions) const;

  // The body is whole.
  absl::Status Check() const;

 private:
  const BucketLayout& layout_;
  Update& update_;
  uint64_t covered_ = 0;
};

// InvalidArgument where a segment has another number of bytes, or where it has no place in the frame at all.
absl::Status CheckBytes(const wire::Segment& s, uint64_t expected);
absl::Status NotOfAnUpdate(const wire::Segment& s);
// FailedPrecondition.
absl::Status MissingExponents(const Update& update);
// The payload of a segment that lies in `chunk`, whose memory it shares.
Bytes PayloadOf(const wire::Segment& s, const Bytes& chunk);

// Reads the segments that one codec writes into update frames, beside float32 values, which any may. One for each
// frame.
class BodyReader {
 public:
  virtual ~BodyReader() = default;
  // `s` lies in `chunk`. Errors: InvalidArgument, FailedPrecondition (the plan of the round is not known here).
  virtual absl::Status Read(const wire::Segment& s, const Bytes& chunk, BodyBuilder* body);
  // After all segments. `plan`: of the round.
  virtual absl::Status Finish(const RoundPlan& plan, BodyBuilder* body);
};

}  // namespace gradwire
