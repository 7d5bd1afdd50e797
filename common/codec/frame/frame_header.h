// What the frames of every codec begin with, and what encoders return.
#pragma once

#include <cstdint>
#include <span>

#include "common/codec/codec.h"
#include "common/wire/frame.h"

namespace gradwire {

inline wire::FrameHeader HeaderFor(const FrameIdentity& id, wire::FrameKind kind, uint32_t shape_digest) {
  wire::FrameHeader h;
  h.kind = kind;
  h.bucket = id.bucket;
  h.shard = id.shard;
  h.round = id.round;
  h.shape_digest = shape_digest;
  h.incarnation = id.incarnation;
  h.nonfinite_rounds = id.nonfinite_rounds;
  return h;
}

inline void AddLearningRates(std::span<const float> rates, wire::FrameWriter* writer) {
  const auto groups = static_cast<uint32_t>(rates.size());
  writer->Add({wire::SegmentType::kLearningRates, 0, 0, groups, groups * static_cast<uint32_t>(sizeof(float))},
              rates.data());
}

// A worker's frame that is encoded by `plan`, up to where its codec goes on.
inline wire::FrameWriter BeginPush(const FrameIdentity& id, const BucketLayout& slice, const RoundPlan& plan) {
  wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kPush, slice.shape_digest);
  header.plan_digest = plan.Digest();
  wire::FrameWriter writer(header);
  AddLearningRates(id.learning_rates, &writer);
  return writer;
}

// The same of an update frame; `id` has no incarnation.
inline wire::FrameWriter BeginUpdateFrame(const FrameIdentity& id, const BucketLayout& slice, uint32_t contributors,
                                          uint16_t flags = 0) {
  wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kUpdate, slice.shape_digest);
  header.contributors = contributors;
  header.flags = flags;
  wire::FrameWriter writer(header);
  AddLearningRates(id.learning_rates, &writer);
  return writer;
}

// The frame that was written, encoded by `plan`.
inline EncodedFrame FinishEncoded(wire::FrameWriter* writer, const RoundPlan& plan, uint64_t sent = 0) {
  EncodedFrame frame;
  frame.sent = sent;
  frame.chunks = writer->Finish();
  frame.bytes = TotalSize(frame.chunks);
  frame.plan = plan;
  return frame;
}

}  // namespace gradwire
