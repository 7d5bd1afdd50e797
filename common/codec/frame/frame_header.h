// What the frames of every codec begin with, and what encoders return.
#pragma once

#include <cstdint>

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

// The frame that was written, encoded by `plan`.
inline EncodedFrame FinishEncoded(wire::FrameWriter* writer, const RoundPlan& plan) {
  EncodedFrame frame;
  frame.chunks = writer->Finish();
  frame.bytes = TotalSize(frame.chunks);
  frame.plan = plan;
  return frame;
}

}  // namespace gradwire
